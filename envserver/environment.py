"""What an environment author writes against.

An environment lives in three places, each with its own instance: the server calls `tasks`, a worker
process calls `rollout` (and never holds a hidden part), a scorer process calls `score`. So keep no
state between the three; `setup` and `close` run once per worker process.

    class Addition(Environment):
        \"\"\"Add two numbers.\"\"\"

        class Config(Environment.Config):
            digits: int = 3

        def tasks(self, split):
            rng = random.Random(f"{self.config.seed}-{split}")
            for index in itertools.count():
                a, b = (rng.randrange(10**self.config.digits) for _ in range(2))
                yield Task(f"add-{index}", {"question": f"{a}+{b}?"}, {"answer": a + b})

        async def rollout(self, task, run):
            reply = await run.chat([{"role": "user", "content": task.public["question"]}])
            return reply.content

        def score(self, task, result):
            return Score(reward=float(str(task.hidden["answer"]) in (result.output or "")))
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Iterator
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from .config import EnvironmentConfig
from .errors import InputError
from .records import Message, PublicTask, Result, Score, Split, Task

Isolation = Literal["pooled", "dedicated", "sandboxed"]


class Reply(msgspec.Struct, frozen=True):
    """The model's answer to one `chat`.

    Args:
        content: its text ("" when it only called tools).
        tool_calls: in OpenAI's shape: `{"id", "type", "function": {"name", "arguments": "JSON"}}`.
        finish_reason: "stop", "tool_calls" or "length".
        message: the whole assistant message, to append to the history as it is.
    """

    content: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    message: Message


class Rollout(Protocol):
    """What `rollout` gets as `run`: the way to the model and what is left of the budget.

    Any agent framework works by being pointed at `base_url` with `api_key` and `model`: its tokens
    are recorded. All are valid for this attempt only.
    """

    rollout_id: str
    attempt: int
    base_url: str
    """Of an OpenAI-compatible endpoint, with its `/v1`."""
    api_key: str
    model: str
    deadline: float
    """`time.time()` at which the rollout is cut off."""
    max_turns: int

    @property
    def seconds_left(self) -> float: ...

    @property
    def client(self) -> Any:
        """A ready `openai.AsyncOpenAI`."""

    @property
    def blocking_client(self) -> Any:
        """A ready `openai.OpenAI`, for a plain `def rollout` (which runs in a thread)."""

    async def chat(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        agent: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """One chat completion.

        Args:
            messages: the history, in OpenAI's shape.
            tools: OpenAI function tools.
            agent: name of the calling agent where a rollout has several.
            sampling: `max_tokens`, `stop`, `tool_choice` ... (temperature and top_p are the run's).

        Raises:
            LimitReached: turns, tokens or time are used up; let it pass: the rollout is scored.
            EngineError: the engine failed; let it pass: the rollout is tried again.
        """

    def chat_blocking(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> Reply:
        """`chat` for a plain `def rollout`."""

    def log(self, event: str, **facts: Any) -> None:
        """A line in the server's log, with this rollout's id."""

    def log_metric(self, name: str, value: float) -> None:
        """A number that is stored with the trajectory; the last value of a name counts."""


class Environment(abc.ABC):
    """Base of every environment. Subclasses write `tasks`, `rollout` and `score`."""

    name: ClassVar[str] = ""
    """Short name; unset: the class name in lower case."""
    isolation: ClassVar[Isolation] = "pooled"
    """The least isolation that its agents need."""
    score_timeout_seconds: ClassVar[float] = 30.0
    """A `score` that takes longer is killed; the rollout is scored again, then dropped."""

    class Config(EnvironmentConfig):
        """Settings of this environment: `--env.*`."""

    config: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()

    @abc.abstractmethod
    def tasks(self, split: Split) -> Iterator[Task]:
        """The tasks, lazily; may be infinite; the same for the same config."""

    @abc.abstractmethod
    def rollout(self, task: PublicTask, run: Rollout) -> Awaitable[Any] | Any:
        """One attempt at `task`, in a worker; `async def` or a plain `def` (run in a thread).

        Returns:
            Anything JSON-like; the scorer gets it as `result.output`.
        """

    @abc.abstractmethod
    def score(self, task: Task, result: Result) -> Score | Awaitable[Score]:
        """The score of one rollout, in a scorer process; may be `async def`."""

    def score_group(self, task: Task, results: list[Result], scores: list[Score]) -> list[Score]:
        """Last word on a group, for relative rewards; same length and order as `scores`."""
        return scores

    async def setup(self) -> None:  # noqa: B027 - a hook, empty by default
        """Once per worker process, before its first rollout."""

    async def close(self) -> None:  # noqa: B027 - a hook, empty by default
        """Once per worker process, at its end."""

    def demonstration(self, task: Task) -> list[Message] | None:
        """Assistant messages that solve `task`, one a turn, or None where there is no such thing.

        The simulated engine plays them (right or spoiled).
        """
        return None

    def task_from_row(self, row: dict[str, Any]) -> Task:
        """A task from one row of a data set, for `envserver score`.

        Raises:
            InputError: the row has not the shape of any data set of this environment.
        """
        raise InputError(
            f"Environment {self.name!r} cannot read data-set rows.", hint="Name a task id instead."
        )

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        """The result that a bare response (`envserver score`) stands for."""
        return Result(output=response, messages=messages)
