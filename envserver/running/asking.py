"""The work of `envserver run`: runs an environment's agent once, on a question or on a task by id.
Out: the scored trajectory, also as a unified document.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from envserver_local.simulated.engine import SimEngine
from envserver_local.simulated.policy import Said, Wish
from envserver_local.simulated.tokenizer import Conversation, assistant_text, canonical_arguments
from envserver_records.errors import (
    ConfigError,
    EngineRefused,
    EnvserverError,
    Failure,
    RolloutError,
)
from envserver_records.records import Message, Result, Score, Task, Trajectory
from pydantic import ValidationError

from ..environment import Environment
from ..export.unified import unified
from ..judges.client import ScorerJudge
from ..models.engine import EngineRequest
from ..rollouts.group import (
    RolloutContext,
    run_once,
    run_single,
    single_request,
    trajectory_of,
)
from ..rollouts.rewards import checked_score, rules_of_rewards, with_turn_rewards
from ..rollouts.stream import GroupRequest
from ..settings.config import SimConfig
from ..settings.section import EnvironmentConfig, Section
from ..workers.debugging import DebugPool
from .context import played_context, rollout_context
from .judging import folder_of, judge_line, judge_of
from .mix import RunSpec
from .options import config_error, faults
from .run_settings import ReplaySettings, RunSettings
from .scoring import TaskFinder

RunOrReplay = TypeVar("RunOrReplay", RunSettings, ReplaySettings)

_UNHURRIED_SECONDS = 7 * 86400.0


class EnvironmentRaised(Exception):
    """The environment's code raised `error` while it was debugged, in `place`: "tasks",
    "prepare_scoring", "rollout" or "score". Its traceback begins in the environment's code."""

    def __init__(self, error: Exception, place: str, environment: type[Environment]) -> None:
        super().__init__(f"{place} raised {type(error).__name__}: {error}")
        self.error = error.with_traceback(_own_frames(error.__traceback__, environment))
        self.place = place


def debuggable(spec: RunSpec[RunOrReplay], *, here: bool = True) -> RunSpec[RunOrReplay]:
    """Returns `spec` without a time limit for rollouts."""
    settings = spec.settings
    if settings.agent.is_set:
        raise ConfigError(
            "--debug stops in the environment's own rollout, which --agent replaces.",
            hint="Leave one of them out.",
        )
    if here and spec.environment_class.isolation == "sandboxed" and not settings.without_walls:
        raise ConfigError(
            f"Agents of {spec.environment_class.name!r} execute the model's code in their own "
            "process: --debug would run it here, without a sandbox.",
            hint="Set --without_walls true only if you have checked what the model wrote.",
        )
    config = settings.env.model_copy(update={"worker_timeout": _UNHURRIED_SECONDS})
    return replace(spec, settings=settings.model_copy(update={"env": config}))


async def run_here(
    context: RolloutContext, environment: Environment, request: GroupRequest, *, scored: bool
) -> Trajectory:
    """Runs and scores the task of `request` once, in this process; `context` has no scorer
    processes. `scored`: whether the answer is known; else the score has no reward."""
    pool = DebugPool(stops=False)
    here = msgspec.structs.replace(context, pool=pool)
    judge = context.scorer.judge
    if scored:
        if judge is not None:
            environment.judge = ScorerJudge(judge.register(nullcontext))
        with _raising("prepare_scoring", environment):
            environment.prepare_scoring()
        context.scorer.needs_token_ids = environment.scores_token_ids
    try:
        finished = await run_once(here, request, f"{request.group_id}-r0", 1)
    except RolloutError:
        if pool.error is None or isinstance(pool.error, RolloutError):
            raise
        if isinstance(pool.error, ConfigError):  # it cannot run in this process
            raise pool.error from None
        raise EnvironmentRaised(pool.error, "rollout", type(environment)) from None
    score = Score(reward=None)
    if scored:
        in_thread = judge is not None  # which answers from this thread's loop
        score = await _score(environment, request.task, finished.result, in_thread=in_thread)
    return trajectory_of(context, finished, score)


@contextlib.contextmanager
def _raising(
    place: str, environment: Environment, but: type[Exception] = EnvserverError
) -> Iterator[None]:
    """Has errors of the environment's code, `but` those, raised as EnvironmentRaised."""
    try:
        yield
    except but:
        raise
    except Exception as error:  # noqa: BLE001 - the environment's code
        raise EnvironmentRaised(error, place, type(environment)) from None


async def _score(environment: Environment, task: Task, result: Result, *, in_thread: bool) -> Score:
    with _raising("score", environment, RolloutError):
        if in_thread and not inspect.iscoroutinefunction(environment.score):
            score = await asyncio.to_thread(environment.score, task, result)
        else:
            score = environment.score(task, result)
        if inspect.isawaitable(score):
            score = await score
    rules = rules_of_rewards(environment)
    return checked_score(with_turn_rewards(score, result, rules), result, rules)


def _own_frames(
    trace: TracebackType | None, environment: type[Environment]
) -> TracebackType | None:
    folder = Path(inspect.getfile(environment)).resolve().parent
    first = trace
    while first is not None:
        if folder in Path(first.tb_frame.f_code.co_filename).resolve().parents:
            return first
        first = first.tb_next
    return trace


PERSON = "sim"
"""The model's name: the tokens are those of the simulated engine."""


class PersonRequest(msgspec.Struct, frozen=True):
    line: str
    messages: list[Message]
    tools: list[dict[str, Any]]


Answer = Callable[[PersonRequest], Message | None]
"""Returns the assistant's message; None: the person has left. May block."""


class PersonEngine(SimEngine):
    """The simulated engine with a person as the model, whose messages come from `answer`.
    It shows one request at a time; the event loop goes on while the person types."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(SimConfig(latency_seconds=0.0), speaker=self)
        self._answer = answer
        self._one_at_a_time = asyncio.Lock()
        self._said: dict[str, str] = {}

    def say(self, conversation: Conversation, wish: Wish, *, fate: str, key: str) -> Said:
        return Said(self._said[wish.rollout_id])

    async def post(self, request: EngineRequest) -> dict[str, Any]:
        """The time in which the person thinks does not count."""
        await self._ask(request.body, request.rollout_id)
        return await super().post(request)

    @contextlib.asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        await self._ask(request.body, request.rollout_id)
        async with super().stream(request) as chunks:
            yield chunks

    async def _ask(self, body: dict[str, Any], rollout_id: str) -> None:
        request = PersonRequest(rollout_id, body.get("messages") or [], body.get("tools") or [])
        async with self._one_at_a_time:
            message = await _in_daemon_thread(lambda: self._answer(request))
        if message is None:
            raise EngineRefused("The person acting as the model has left.", status=400)
        self._said[rollout_id] = assistant_text(_canonical(message))


def _canonical(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        with suppress(ValueError):
            function["arguments"] = canonical_arguments(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


async def _in_daemon_thread(work: Callable[[], Message | None]) -> Message | None:
    """Runs `work` in a thread that nothing joins: it may wait for a key forever."""
    done: Future[Message | None] = Future()
    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only left alone

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - handed over to the one who awaits it
            done.set_exception(error)

    threading.Thread(target=run, name="person", daemon=True).start()
    return await asyncio.wrap_future(done)


S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Answered:
    task_id: str
    trajectory: Trajectory
    document: dict[str, Any]
    judge: str


@dataclass(frozen=True)
class Asking:
    spec: RunSpec[RunSettings]
    environment: Environment
    question: Environment.Question | None

    @property
    def is_scored(self) -> bool:
        return self.question is None or self.question.is_scored()


def asking(spec: RunSpec[RunSettings]) -> Asking:
    question = _question(spec)
    if question is not None:
        spec = _with_implied(spec, question)
    if spec.settings.debug or spec.settings.interactive:
        spec = debuggable(spec, here=spec.settings.debug)
    return Asking(spec, spec.make_environment(), question)


async def ask(
    asking: Asking, failed: Callable[[Failure], None], person: Answer | None = None
) -> Answered:
    settings, environment, question = asking.spec.settings, asking.environment, asking.question
    posed = None if question is None else environment.task_from_question(question)
    async with _parts(asking, person) as context:
        task = posed if posed is not None else await _named_task(asking)
        if settings.debug:
            request = single_request(environment, task)
            trajectory = await run_here(context, environment, request, scored=asking.is_scored)
        else:
            trajectory = await run_single(context, task, scored=asking.is_scored, failed=failed)
        ended_at, model, judge = time.time(), context.model, context.scorer.judge
    document = unified(
        trajectory,
        ended_at=ended_at,
        question=None if question is None else question.question,
        final_answer=environment.final_answer(
            Result(output=trajectory.output, messages=trajectory.messages)
        ),
        model=model,
        seed=environment.config.seed,
        source="envserver run",
        tokens=settings.include_tokens,
    )
    judged = judge_line(judge) if judge is not None and judge.counts.calls else ""
    return Answered(task.id, trajectory, document, judged)


@contextlib.asynccontextmanager
async def _parts(asking: Asking, person: Answer | None) -> AsyncIterator[RolloutContext]:
    settings, here = asking.spec.settings, asking.spec.settings.debug
    common = settings, asking.environment, asking.spec.reference
    if person is None:
        async with rollout_context(*common, scores_here=here) as context:
            yield context
        return
    engine = PersonEngine(person)
    async with (
        judge_of(settings.judge, folder_of(settings.store)) as judge,
        played_context(*common, engine, PERSON, judge, scores_here=here) as context,
    ):
        # A person who left does not come back for a second try.
        once = context.rollouts.model_copy(update={"max_attempts": 1})
        yield msgspec.structs.replace(context, rollouts=once)


async def _named_task(asking: Asking) -> Task:
    spec, environment = asking.spec, asking.environment
    finder = TaskFinder(environment)
    name = spec.settings.task or ""
    if not spec.settings.debug:
        return await finder.find(name)
    with _raising("tasks", environment):
        return finder.find_here(name)


def _question(spec: RunSpec[RunSettings]) -> Environment.Question | None:
    kind = spec.environment_class.Question
    given = {
        name: getattr(spec.settings, name)
        for name, field in kind.model_fields.items()
        if not field.is_required() or getattr(spec.settings, name) is not None
    }
    if spec.settings.task is None:
        missing = [name for name in kind.model_fields if name not in given]
        if missing:
            raise ConfigError(
                f"--{missing[0]} is needed.", hint="Or name a task of the environment: --task ID."
            )
        return _validated(kind, given, "--")
    set_too = sorted(spec.settings.model_fields_set & kind.model_fields.keys())
    if set_too:
        raise ConfigError(
            f"A task is run as it is: --{set_too[0]} cannot be given with --task.",
            hint="Give a question, or the id of a task.",
        )
    return None


def _with_implied(
    spec: RunSpec[RunSettings], question: Environment.Question
) -> RunSpec[RunSettings]:
    implied = question.settings()
    if not implied:
        return spec
    config: EnvironmentConfig = spec.settings.env
    given = config.model_dump(exclude_unset=True) | implied
    env = _validated(type(config), given, "--env.")
    return replace(spec, settings=spec.settings.model_copy(update={"env": env}))


def _validated(kind: type[S], values: dict[str, Any], prefix: str) -> S:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = (f"{prefix}{'.'.join(map(str, at))}: {what}." for at, what in faults(error))
        raise config_error(problems) from None
