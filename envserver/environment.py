"""The interface that environment authors implement.

An environment runs in three processes, each with its own instance: the server calls `tasks`, a
worker calls `rollout` (and never sees the hidden part of a task), a scorer calls `score`. Keep no
state between the three. `setup` and `close` run once per worker process.

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
import re
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Literal

import msgspec
from envserver_records.errors import InputError
from envserver_records.sandboxes import SandboxSpec
from envserver_records.tasks import Message, Result, Score, Split, Task, text_of
from typing_extensions import TypeVar

from .judge_interface import Judge
from .rollout_interface import Caller as Caller
from .rollout_interface import HarnessTask, ModelCall, Rollout
from .rollout_interface import Service as Service
from .rollout_interface import Services as Services
from .sandbox_interface import Sandboxes
from .settings.section import EnvironmentConfig, Section
from .tools.sources import ToolSource
from .tools.typed import TypedTool

_LESS = 1e-6
Isolation = Literal["pooled", "dedicated", "sandboxed"]
NO_REWARDS: Final = (
    "run.reward is not available with isolation 'sandboxed', where code of the model could call it;"
    " let `score` return Score(turns=...)."
)


class AgentRole(msgspec.Struct, frozen=True):
    """An agent role that the environment declares for a multi-agent rollout.

    Args:
        trained: whether its tokens are trained by default (`--env.agents.NAME.trained` overrides
            it). Tokens of an untrained agent are recorded, but are in no training row and do not
            count towards the limits of the other agents.
    """

    trained: bool = True


class KnownResult(msgspec.Struct, frozen=True):
    """A result whose reward is known, for `envserver check`.

    Args:
        name: describes it in a few words: "gold", "overwrites the tests".
        result: as an agent would leave it.
        least, most: bounds of the reward.
    """

    name: str
    result: Result
    least: float = 0.0
    most: float = 0.0


TaskT = TypeVar("TaskT", default=Task)
"""The type of an environment's tasks: `Task`, or its own row (see `typed_tasks`)."""


class Environment(abc.ABC, Generic[TaskT]):
    """Base class of every environment. Subclasses implement `tasks`, `rollout` and `score`.

    `Environment[Row]` has tasks of the class `Row`: a dataclass or msgspec struct (`typed_tasks`).
    """

    name: ClassVar[str] = ""
    """Short name; defaults to the class name in lower case."""
    isolation: ClassVar[Isolation] = "pooled"
    """The minimum isolation that its agents need."""
    sandbox_images: ClassVar[bool] = False
    """Whether sandboxes may use the image that the public part of the task names (`image`)."""
    sandbox: SandboxSpec | None = None
    """The sandbox that rollouts and scores may open, and its upper limits; None: no sandbox."""
    egress: ClassVar[Sequence[str]] = ()
    """Hosts that agents may reach through the server's recording proxy (`run.egress_url`):
    "api.example.com", "api.example.com:8443", "*.example.com". With isolation "sandboxed", and for
    programs in `run.open_sandbox()`, there is no other way out."""
    preload: ClassVar[tuple[str, ...]] = ("openai",)
    """Modules imported in the process that workers are forked from, unless workers are pooled.
    List what an agent uses and would otherwise import at each start. Unused modules slow each fork
    down a little."""
    companion: ClassVar[str] = ""
    """With isolation "sandboxed": a function ("module:name") that a small process runs in the same
    sandbox as the agent; see `take_companion`. Its module should import little."""
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """The lowest and highest reward of an agent, turn rewards included; ends may be infinite. A
    score outside of it is a bug in the environment: the rollout is dropped at once."""
    solved_at: ClassVar[float | None] = None
    """The least reward of a solved task; None: the highest reward."""
    tools: Sequence[ToolSource] | None = None
    """Offered to the model by `run.loop`: tools, typed functions, MCP servers. None: the methods
    that are marked with `@tool`."""
    exact_demonstrations: ClassVar[bool] = False
    """Whether the simulated engine repeats demonstrations word for word, with no sentence before
    them. Set it where `rollout` reads an answer as a whole, such as a move of a game."""
    demonstrations_solve: ClassVar[bool] = True
    """Whether demonstrations solve their tasks. False if they only play well, as in a game between
    agents; `envserver check` then expects no reward of them."""
    component_weights: ClassVar[Mapping[str, float]] = {}
    """A rubric such as `{"correct": 1.0, "format": 0.1}`: the reward of a `Score(components=...)`
    without a reward is the sum of its components by these weights."""
    checks_rows: ClassVar[bool] = False
    """Whether `envserver check` scores the `row_results` of all rows: where a score is cheap."""
    scores_token_ids: bool = False
    """Whether `score` reads `result.completion_ids`; may be set in `prepare_scoring`."""
    score_cpu_seconds: ClassVar[float] = 30.0
    """CPU seconds that one `score` may use, with the processes that it starts, which end with the
    run. Waiting and `prepare_scoring` do not count."""
    score_timeout_seconds: ClassVar[float] = 300.0
    """Seconds by the clock after which a `score` is killed that waits or hangs. The rollout is
    scored once more, then dropped."""

    class Config(EnvironmentConfig):
        """Settings of this environment: `--env.*`."""

    class Question(Section):
        """A question for `envserver run`: each field is a flag there."""

        question: str
        """The question to ask."""
        answer: str | None = None
        """The right answer, if known: the answer of the run is scored against it."""

        def settings(self) -> dict[str, Any]:
            """Returns settings of the environment (`--env.*`) that this question implies."""
            return {}

        def is_scored(self) -> bool:
            """Returns whether enough is known to score an answer."""
            return self.answer is not None

    config: Any
    sandboxes: Sandboxes
    """For `score` and `tasks` if `sandbox` is declared (agents use `run.open_sandbox`)."""
    judge: Judge
    """For `score` and `score_group`: the model that `--judge.*` names (`envserver/judges`)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()

    @abc.abstractmethod
    def tasks(self, split: Split) -> Iterator[TaskT]:
        """Yields the tasks lazily; may be infinite; the same tasks for the same config."""

    @abc.abstractmethod
    def rollout(self, task: TaskT, run: Rollout) -> Awaitable[Any] | Any:
        """Makes one attempt at `task`, in a worker; `async def` or a plain `def` (in a thread).

        The task has no hidden part: it is a `PublicTask`, or a row without its hidden fields.

        Returns:
            A JSON-like value; the scorer gets it as `result.output`.
        """

    def harness_task(self, task: TaskT, run: Rollout) -> Awaitable[HarnessTask] | HarnessTask:
        """Returns what an external agent gets for `task`, which runs instead of `rollout`
        (`--agent`), and how its output is read; may be `async def`.

        It runs in the worker, which then runs the program, too: isolation "sandboxed". Without this
        method (it raises NotImplementedError) `--agent` is refused at the start.
        """
        raise NotImplementedError

    def prepare_scoring(self) -> None:
        """Loads what `score` needs. Runs once per scorer process, before any limit applies."""

    @abc.abstractmethod
    def score(self, task: TaskT, result: Result) -> Score | Awaitable[Score]:
        """Scores one rollout, in a scorer process; may be `async def`.

        `Score` has the forms of a reward: a number, numbers by agent, numbers by turn, weighted
        components. All must be in `reward_range`.
        """

    def score_group(
        self, task: TaskT, results: list[Result], scores: list[Score]
    ) -> list[Score] | Awaitable[list[Score]]:
        """Adjusts the scores of a whole group, for relative rewards; keeps length and order.

        The scores hold everything that is delivered: rewards by agent and of turns, those of
        `run.reward` included; what it returns replaces all of it. May be `async def`, like `score`.
        """
        return scores

    def agents(self) -> Mapping[str, AgentRole]:
        """Returns the agent roles of a multi-agent rollout by name (lower case, digits and _).

        The first is the main agent. Agents name themselves in `run.chat(..., agent=name)` or use
        `run.base_url_of(name)`. Empty: a single agent without a name.
        """
        return {}

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        """Runs services on the server for its agents: network access, API keys, large indexes, and
        whatever needs the hidden part of a task during a rollout (a game's secret, a simulated
        user). A service gets the hidden part as `caller.task.hidden`; the worker never does.

        Names may contain slashes ("tavily/search"). If the mapping is a `Services`, each rollout
        can have its own state, counters are in `/metrics` and groups record what agents were shown.

        The server enters the block once at its start and leaves it at its end. A service runs on
        the server's event loop and must not block it. It is cancelled when the attempt that called
        it ends, and reports failures by raising (see `Service`). Agents use `run.call_tool`, or any
        HTTP client with `run.tools_url`.
        """
        return nullcontext({})

    def on_request(self, call: ModelCall) -> Awaitable[None] | None:
        """Looks at a model call before the engine gets it; may change or refuse it.

        Runs on the server, like a service, with the task's hidden part and the rollout's state
        (`call.caller`). It may be `async def`, and must not block the server's event loop. What it
        does is recorded with its reason. If it raises, that is a bug of the environment; a
        ServiceError is a failure of the infrastructure, and the rollout is retried.
        """
        return None

    def on_answer(self, call: ModelCall) -> Awaitable[None] | None:
        """Looks at the engine's answer before the agent gets it; may change or refuse it.

        As `on_request`, once for each answer (`call.answer`). An environment with this hook gets
        the whole answer before its first byte is sent on, also if the agent wants a stream. Tokens
        of an answer that was changed or refused are recorded, and not trained by default.
        """
        return None

    async def setup(self) -> None:
        """Runs once per worker process, before its first rollout."""

    async def close(self) -> None:
        """Runs once per worker process, at its end."""

    def demonstration(self, task: TaskT) -> list[Message] | Mapping[str, list[Message]] | None:
        """Returns assistant messages that solve `task`, one a turn, or None if there are none.

        The simulated engine answers with them, correct or corrupted. With several agents, return
        messages by agent name; a bare list is of each trained agent.
        """
        return None

    def known_results(self, task: TaskT) -> Iterator[KnownResult]:
        """Yields results of `task` with known rewards: the gold one, broken ones, reward hacks.

        `envserver check` scores them all, adds empty and absurd results by itself, and plays
        demonstrations through `rollout`.
        """
        return iter(())

    def row_results(self, tasks: Sequence[TaskT]) -> Iterator[tuple[TaskT, KnownResult]]:
        """Yields known results of some tasks, with `checks_rows`: the gold, and wrong answers.

        It runs in a scorer process, so it may prepare the scores of all of them. By default the
        wrong answers of a task are none, and the gold of the next task, if it says something else.
        """
        golds = [
            next((result for result in self.known_results(task) if result.least > 0), None)
            for task in tasks
        ]
        low, high = self.reward_range
        unsolved = (high if self.solved_at is None else self.solved_at) - _LESS
        for place, (task, gold) in enumerate(zip(tasks, golds, strict=True)):
            if gold is None:
                continue
            yield task, msgspec.structs.replace(gold, name="gold")
            yield task, KnownResult("no answer", Result(output=""), low, max(low, 0.0))
            other = golds[(place + 1) % len(golds)]
            if other is not None and _says_else(other.result, task, gold.result):
                yield task, KnownResult("another row's gold", other.result, low, unsolved)

    def baselines(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the baselines of an evaluation by name (lower case, digits and _).

        Each baseline is the settings (`--env.*`) that differ from the evaluated run.
        `envserver evaluate` runs them, too.
        """
        return {}

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        """Writes sample files of the environment's inputs to `folder`, for `envserver sample`.

        Returns:
            The settings (`--env.*`) that read them; empty: its tasks come from no file.
        """
        return {}

    def task_from_row(self, row: dict[str, Any]) -> TaskT:
        """Returns the task of one data-set row, for `envserver score`.

        Raises:
            InputError: the row does not fit any data set of this environment.
        """
        raise InputError(
            f"Environment {self.name!r} cannot read data-set rows.", hint="Name a task id instead."
        )

    def task_from_question(self, asked: Any) -> TaskT:
        """Returns the task of one question (a `Question` of this environment), for `envserver run`.

        Raises:
            InputError: the environment does not support questions.
        """
        raise InputError(
            f"Environment {self.name!r} does not support single questions.",
            hint="Name one of its data sets to `process`.",
        )

    def final_answer(self, result: Result) -> str:
        """Returns the answer of a rollout as text, for people and data; "" if there is none."""
        return answer_text(result)

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        """Returns the result for a bare response text (`envserver score`)."""
        return Result(output=response, messages=messages)


def tools_of(environment: Environment) -> Sequence[ToolSource]:
    """Returns the tools of `run.loop`: `environment.tools`, else its methods that are tools."""
    methods = list(typed_methods(environment).values())
    if environment.tools is None:
        return methods
    # A class that lists its own methods names them before there is an object.
    bound = {
        method.original.func: method for method in methods if isinstance(method.original, partial)
    }
    return [
        bound.get(tool.original, tool) if isinstance(tool, TypedTool) else tool
        for tool in environment.tools
    ]


def typed_methods(environment: Environment) -> dict[str, TypedTool]:
    """Returns the methods of an environment that are marked with `@tool`, base classes first."""
    held: dict[str, Any] = {}
    for base in reversed(type(environment).__mro__):
        held.update(vars(base))
    return {
        name: tool.__get__(environment)
        for name, tool in held.items()
        if isinstance(tool, TypedTool)
    }


def _says_else(other: Result, task: Any, gold: Result) -> bool:
    """Returns whether the answer `other` has no words in common with `gold` or the hidden part."""
    hidden = msgspec.json.encode(getattr(task, "hidden", None)).decode()
    own, theirs = f"{answer_text(gold)} {hidden}", answer_text(other)
    words, others = (set(re.findall(r"\w+", text.casefold())) for text in (own, theirs))
    return bool(others) and not words & others


_ANSWERS = ("final_answer", "answer", "patch", "code", "plan", "text")
"""Keys of an output dict that may hold the answer; the first one that is not empty counts."""


def answer_text(result: Result) -> str:
    """Returns the answer in the output of `result`, or else its last assistant message."""
    output = result.output
    if isinstance(output, dict):
        held = [output[name] for name in _ANSWERS if name in output]
        if held:
            output = next((text for text in held if text not in (None, "")), "")
            return output if isinstance(output, str) else msgspec.json.encode(output).decode()
        output = output or None
    if output in (None, "") and result.messages:
        last = result.messages[-1]
        output = text_of(last) if last.get("role") == "assistant" else ""
    if output is None or isinstance(output, str):
        return output or ""
    return msgspec.json.encode(output).decode()
