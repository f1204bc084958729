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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import msgspec
from envserver_records.errors import InputError
from envserver_records.records import (
    ExecResult,
    Message,
    PublicTask,
    Result,
    SandboxLimits,
    SandboxSpec,
    SandboxUsage,
    Score,
    Split,
    Task,
    text_of,
)

from .config import EnvironmentConfig, Section

Isolation = Literal["pooled", "dedicated", "sandboxed"]


class AgentRole(msgspec.Struct, frozen=True):
    """One of several agents of a rollout, as the environment declares it.

    Args:
        trained: whether its tokens are trained, unless a person says otherwise
            (`--env.agents.NAME.trained`). Those of an agent that is not are recorded, but stand in
            no training row and count for no limit of the others.
    """

    trained: bool = True


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


class Sandbox(Protocol):
    """A place for programs that a model wrote: no network, nothing of ours, bounded in everything.

    Programs run one after the other; when one ends, whatever it started is killed. What they wrote
    below /work stays until `close`. A program that fails or passes its limits is a result, never an
    exception.

    Raises (every method):
        SandboxError: the sandbox itself failed or is closed; let it pass: the rollout is retried.
    """

    id: str
    isolation: str
    """The wall: "namespace", "bubblewrap", "landlock", "docker" or "unsafe-local"."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/work",
        env: dict[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Runs a program; it is found by PATH. One that cannot be started exits with 127.

        Args:
            env: added to the sandbox's own variables.
            limits: tighter than the sandbox's own; what is over those is cut down to them.

        Raises:
            InputError: `stdin` is over `input_kb`.
        """

    async def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Runs `code` as `python -I -c code` would, forked from a warm interpreter (milliseconds).

        The sandbox's `preload` is imported already. Raises like `exec`.
        """

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """The first `max_bytes` of a regular file; relative paths are below /work.

        Raises:
            InputError: there is no such file, or it is none that can be read.
        """

    async def write(self, path: str, data: bytes) -> None:
        """Replaces a file; parents are made. Raises like `read`."""

    async def total(self) -> SandboxUsage:
        """What all programs until now used."""

    async def close(self) -> None:
        """Ends it; returns when every process of it is gone. May be called twice."""


class Sandboxes(Protocol):
    """Makes sandboxes: `async with sandboxes.open(SandboxSpec()) as sandbox: ...`."""

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox, closed at the end.

        Raises:
            SandboxError: none can be made now.
            InputError: a file or the archive of the spec cannot be unpacked, or does not fit.
        """


@dataclass(frozen=True)
class Caller:
    """On whose behalf a service is asked.

    Args:
        group_id: of the rollouts that are compared with this one.
        task: what is known of it outside of scoring.
        flag: puts a word on the trajectory, such as "web_leak_dropped".
    """

    rollout_id: str
    group_id: str
    task: PublicTask
    flag: Callable[[str], object]


Service = Callable[[dict[str, Any], Caller], Awaitable[Any]]
"""Takes a JSON object, gives something JSON-like. It may raise InputError, which the agent is told;
ServiceError and whatever else it raises is our failure, and the rollout is tried again."""


class Services(dict[str, Service]):
    """Services by name, with what is to be known of them.

    Args:
        counts: of what was asked since the start, by name, for `/metrics`.
        shown: what the rollouts of a group (by its id) were shown, JSON-like, so that a later run
            can be compared; it is written into the group. Asked once a group, at its end.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        *,
        counts: Callable[[], Mapping[str, float]] = dict,
        shown: Callable[[str], dict[str, Any]] = lambda group_id: {},
    ) -> None:
        super().__init__(services)
        self.counts = counts
        self.shown = shown


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
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        agent: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """`chat` for a plain `def rollout`."""

    def base_url_of(self, agent: str) -> str:
        """`base_url` for the framework of one of several agents: what it asks is asked by it."""

    def open_sandbox(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox on the server for what the model writes; what it used is in the trajectory.

        Args:
            spec: unset: the environment's own (`Environment.sandbox`). Its limits are cut down to
                that one's, and only modules that stand there may be preloaded.

        Raises:
            SandboxError: none can be made, or the environment declares none.
        """

    def open_sandbox_blocking(self, spec: SandboxSpec | None = None) -> AbstractContextManager[Any]:
        """`open_sandbox` for a plain `def rollout`: a Sandbox whose methods wait."""

    @property
    def tools_url(self) -> str:
        """Below which the environment's services answer `POST {name}`, to whoever sends JSON."""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """What the service `name` of the environment (`Environment.services`) answers.

        Raises:
            InputError: it refuses these arguments, or there is no such service.
            LimitReached: time or calls are used up; let it pass: the rollout is scored.
            ServiceError: it failed; let it pass: the rollout is tried again.
        """

    def call_tool_blocking(self, name: str, arguments: dict[str, Any]) -> Any:
        """`call_tool` for a thread."""

    def log(self, event: str, **facts: Any) -> None:
        """A line in the server's log, with this rollout's id."""

    def log_metric(self, name: str, value: float) -> None:
        """A number that is stored with the trajectory; the last value of a name counts."""

    def log_action(self, tool: str, input: Any = None, output: Any = None) -> None:
        """One step for readers and for data: what was done, with what, and what came of it.

        Kept in order (`result.actions`, the unified trajectory), also of a rollout that is cut off.
        Input and output are JSON-like; what is very long is cut off and marked, and so is what
        comes after thousands of steps. A reward never reads them: the agent's process writes them.
        """


class KnownResult(msgspec.Struct, frozen=True):
    """A result whose reward is known.

    Args:
        name: what it is, in a few words: "gold", "overwrites the tests".
        result: as an agent would leave it.
        least, most: the reward must lie between these.
    """

    name: str
    result: Result
    least: float = 0.0
    most: float = 0.0


class Environment(abc.ABC):
    """Base of every environment. Subclasses write `tasks`, `rollout` and `score`."""

    name: ClassVar[str] = ""
    """Short name; unset: the class name in lower case."""
    isolation: ClassVar[Isolation] = "pooled"
    """The least isolation that its agents need."""
    sandbox_images: ClassVar[bool] = False
    """Whether an agent's sandbox may have the image that its task's public part names (`image`)."""
    sandbox: SandboxSpec | None = None
    """The sandbox that rollouts and scores may open, and the most that one may use; None: none."""
    preload: ClassVar[tuple[str, ...]] = ("openai",)
    """Modules that are imported where its workers are forked, unless they are pooled: what an agent
    uses and would else import itself, each time. Every fork pays a little for what is not used."""
    score_timeout_seconds: ClassVar[float] = 30.0
    """A `score` that takes longer is killed; the rollout is scored again, then dropped."""

    class Config(EnvironmentConfig):
        """Settings of this environment: `--env.*`."""

    class Question(Section):
        """What a person may ask by `run`: each field is a flag there."""

        question: str
        """What is asked."""
        answer: str | None = None
        """The right answer, where it is known: the run is scored by it."""

        def settings(self) -> dict[str, Any]:
            """Settings of the environment (`--env.*`) that this question implies."""
            return {}

        def is_scored(self) -> bool:
            """Whether enough is known for a score."""
            return self.answer is not None

    config: Any
    sandboxes: Sandboxes
    """For `score` and `tasks`, where `sandbox` is declared (agents have `run.open_sandbox`)."""

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

    def agents(self) -> Mapping[str, AgentRole]:
        """The agents of a rollout where it has several, by name (small letters, digits and _); the
        first is the main one. They name themselves in `run.chat(..., agent=name)`, or ask at
        `run.base_url_of(name)`. Empty: there is one, without a name."""
        return {}

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        """What the server does for agents that cannot or must not do it themselves: what needs the
        network, a key, a large index. By name; names may hold slashes ("tavily/search"). As
        `Services` they are counted in `/metrics`, and groups tell what they showed.

        The block is entered once in the server process and left at its end. A service runs on the
        server's event loop: it must not block it. It ends with the attempt that asked; a failure
        is told by raising (see `Service`). Agents ask with `run.call_tool`, or any HTTP client at
        `run.tools_url`.
        """
        return nullcontext({})

    async def setup(self) -> None:  # noqa: B027 - a hook, empty by default
        """Once per worker process, before its first rollout."""

    async def close(self) -> None:  # noqa: B027 - a hook, empty by default
        """Once per worker process, at its end."""

    def demonstration(self, task: Task) -> list[Message] | Mapping[str, list[Message]] | None:
        """Assistant messages that solve `task`, one a turn, or None where there is no such thing.

        The simulated engine plays them (right or spoiled). Of several agents: those of each, by
        name; a bare list is played by each trained one.
        """
        return None

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        """Results of `task` whose rewards are known: the gold one, broken ones, cheats.

        `envserver check` scores them all; empty and absurd results it adds by itself.
        """
        return iter(())

    def baselines(self) -> Mapping[str, Mapping[str, Any]]:
        """Runs that results are to be held against, by name (small letters, digits and _): the
        settings (`--env.*`) by which each differs. `envserver evaluate` makes them too."""
        return {}

    def task_from_row(self, row: dict[str, Any]) -> Task:
        """A task from one row of a data set, for `envserver score`.

        Raises:
            InputError: the row has not the shape of any data set of this environment.
        """
        raise InputError(
            f"Environment {self.name!r} cannot read data-set rows.", hint="Name a task id instead."
        )

    def task_from_question(self, asked: Any) -> Task:
        """The task of one question (`asked` is a `Question` of this environment), for `run`.

        Raises:
            InputError: it cannot be asked.
        """
        raise InputError(
            f"Environment {self.name!r} cannot be asked single questions.",
            hint="Name one of its data sets to `process`.",
        )

    def final_answer(self, result: Result) -> str:
        """The answer of a rollout as text, for people and data; "" for none."""
        return answer_text(result)

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        """The result that a bare response (`envserver score`) stands for."""
        return Result(output=response, messages=messages)


_ANSWERS = ("final_answer", "answer", "patch", "code", "plan", "text")
"""Under which names outputs hold what was answered; the first that says something counts."""


def answer_text(result: Result) -> str:
    """What `result` says in the end: its output, or what stands in it, else its last message."""
    output = result.output
    if isinstance(output, dict):
        held = [output[name] for name in _ANSWERS if name in output]
        if held:
            output = next((one for one in held if one not in (None, "")), "")
            return output if isinstance(output, str) else msgspec.json.encode(output).decode()
        output = output or None
    if output in (None, "") and result.messages:
        last = result.messages[-1]
        output = text_of(last) if last.get("role") == "assistant" else ""
    if output is None or isinstance(output, str):
        return output or ""
    return msgspec.json.encode(output).decode()
