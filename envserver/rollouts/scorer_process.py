"""Runs inside a scorer process: `serve` loads one environment and scores in the main thread.

A score that leaves this module is valid: see `rewards.checked_score`. The process that the server
starts is a keeper: it forks the scorer and ends with it, with the same status, or when the server
closes its end of the socket. It leaves no process that the scorer started, in whatever session. It
kills the scorer with SIGXCPU when one call, with all that it starts, uses more than the
environment's `score_cpu_seconds`. Loading does not count, nor does time in which they wait.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import functools
import inspect
import math
import mmap
import os
import pickle
import resource
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from envserver_records.errors import (
    Blame,
    ConfigError,
    EnvserverError,
    Failure,
    InputError,
    NotFoundError,
    Outcome,
    RewardError,
    ScorerError,
)
from envserver_records.framing import frame, receive_frame
from envserver_records.tasks import Result, Score, Task
from pydantic import ValidationError

from ..environment import Environment
from ..folders import import_path
from ..judges.client import JudgeAddress, ScorerJudge
from ..registry import find
from ..sandbox.maker import SandboxAddress
from ..sandbox.opening import WatchedSandboxes
from ..tools.calling import blaming, may_be_bug, place_of
from ..workers import linux
from ..workers.failures import bug_of
from .rewards import (
    RewardRules,
    checked_score,
    delivered_score,
    reward_error,
    rules_of_rewards,
    with_turn_rewards,
)
from .stream import digest_of, first_tasks


def with_rubric(environment: Environment, reference: str) -> Environment:
    """Returns `environment`, scoring as the class that `reference` names:

        class Shorter:
            def __init__(self, environment):
                self.environment = environment

            def score(self, task, result):
                score = self.environment.score(task, result)
                return Score(reward=score.reward * (0.5 if result.turns > 4 else 1.0))

    `score` is as of `Environment` and may be `async`; `score_group`, where there is one, has the
    last word on a group; `environment.judge` asks a model (`--judge.*`); `prepare_scoring` loads
    libraries before the first score. The constructor takes the environment, or nothing. A subclass
    of Environment is a rubric, too: it is made with the environment's settings. `reference`:
    `path/to/file.py:Class`, or without the class where the file has only one.
    """
    made = _made(rubric_class(reference), environment, reference)
    if isinstance(made, Environment):
        if hasattr(environment, "sandboxes"):
            made.sandboxes = environment.sandboxes
        if hasattr(environment, "judge"):
            made.judge = environment.judge
        return made
    scorer = copy.copy(environment)  # the rubric's own goes on scoring as it did
    for name in ("score", "score_group", "prepare_scoring"):
        if callable(method := getattr(made, name, None)):
            setattr(scorer, name, method)
    return scorer


def rubric_class(reference: str) -> type[Any]:
    path, _, name = reference.partition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise NotFoundError(
            f"There is no rubric {reference!r}.", hint="Name it as path/to/file.py:Class."
        )
    (module,) = import_path(Path(path))
    found = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and callable(getattr(value, "score", None))
    }
    if name in found:
        return found[name]
    if name or len(found) != 1:
        known = ", ".join(found) or "none"
        wanted = f"no class {name!r} with a `score`" if name else f"{len(found)} such classes"
        raise ConfigError(
            f"{reference}: there is {wanted}.", hint=f"Classes with a `score`: {known}."
        )
    return next(iter(found.values()))


def _made(kind: type[Any], environment: Environment, reference: str) -> Any:
    hint = "Its constructor takes the environment, or nothing."
    with blaming(f"The rubric {reference} cannot be made", hint=hint):
        if issubclass(kind, Environment):
            config = environment.config.model_dump(mode="json")
            known = {key: config[key] for key in kind.Config.model_fields if key in config}
            return kind(kind.Config.model_validate(known))
        takes_one = bool(inspect.signature(kind).parameters)
        return kind(environment) if takes_one else kind()


TRACEBACK_CHARACTERS = 4000
_LOOK_MILLISECONDS = 100
NUMBER_BYTES = 8


class ScorerAnswer(msgspec.Struct):
    """The result of a call: `value` or `failure`. `seconds` by the clock, `cpu_seconds` of this
    process and the children that it waited for."""

    value: Any = None
    failure: Failure | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class ScoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one score: CPU seconds of all its processes, and seconds by the clock."""

    cpu_seconds: float
    timeout_seconds: float


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    limits: ScoreLimits
    rewards: RewardRules
    token_ids: bool = False


class RowToScore(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `envserver score`. `task`: or a row of one of the environment's data sets;
    `response`: the model's last text, `finish_reason` that of its last answer."""

    task: Task | dict[str, Any]
    response: str
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    finish_reason: str | None = None


class RowScore(msgspec.Struct, frozen=True):
    """The score of one of `Environment.row_results`. `least`, `most`: as expected; `why`: what the
    scorer raised, else the names of its metrics."""

    task_id: str
    name: str
    least: float
    most: float
    reward: float | None
    why: str
    raised: bool


_loaded: Environment | Failure | None = None
_sandboxes: WatchedSandboxes | None = None
_judge = ScorerJudge(None)
_most_cpu_seconds = ctypes.c_double(math.inf)
"""CPU seconds of keeper, scorer and all below at which the scorer is killed; shared by both."""


def serve(channel: socket.socket, arguments: tuple[Any, ...]) -> None:
    """Loads an environment, says so by answer 0, and answers requests until the server closes its
    end. `arguments`: of `load`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A process that is killed at its CPU limit needs no core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    global _most_cpu_seconds
    _most_cpu_seconds = ctypes.c_double.from_buffer(mmap.mmap(-1, ctypes.sizeof(_most_cpu_seconds)))
    _most_cpu_seconds.value = math.inf
    keeper = os.getpid()
    if scorer := os.fork():
        _keep(scorer, channel)
    linux.die_with_parent(keeper, signal.SIGKILL)
    process, answered = os.getpid(), bytes(NUMBER_BYTES)
    load(*arguments)
    with channel, suppress(ConnectionError):
        while True:
            if os.getpid() != process:  # a fork that the environment let return
                os._exit(1)
            channel.sendall(frame(answered))
            request = receive_frame(channel)
            answered = request[:NUMBER_BYTES] + answer(request[NUMBER_BYTES:])


def _keep(scorer: int, channel: socket.socket) -> NoReturn:
    linux.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: linux.kill(scorer))
    ends = select.poll()
    ends.register(os.pidfd_open(scorer), select.POLLIN)
    ends.register(channel, 0)  # that is, POLLHUP
    while not ends.poll(_LOOK_MILLISECONDS):
        if _most_cpu_seconds.value == math.inf:
            continue  # no score runs: an idle scorer costs next to nothing
        if linux.cpu_seconds(os.getpid()) > _most_cpu_seconds.value:
            os.kill(scorer, signal.SIGXCPU)
        for orphan in set(linux.children()) - {scorer}:
            os.waitpid(orphan, os.WNOHANG)
    linux.kill(scorer)
    status = os.waitstatus_to_exitcode(os.waitpid(scorer, 0)[1])
    linux.kill_descendants()
    if status < 0:
        with suppress(OSError):  # of SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def load(
    env_reference: str,
    env_config: dict[str, Any],
    sandbox_address: SandboxAddress | None,
    rubric: str | None = None,
    judge: JudgeAddress | None = None,
) -> None:
    """Runs first in each process. A failure is kept and returned to every request for a score.
    `judge`: where the server answers for the judge."""
    global _loaded, _sandboxes, _judge
    _judge = ScorerJudge(judge)
    if sandbox_address is not None:
        _sandboxes = WatchedSandboxes(sandbox_address)
    outcome = _guarded(lambda: _make_scorer(env_reference, env_config, rubric))
    _loaded = outcome.failure or outcome.value


def answer(request: bytes) -> bytes:
    """Runs a pickled (function of this module, arguments); returns a pickled `ScorerAnswer`."""

    def call() -> Any:
        with _limited_cpu():
            function, arguments = pickle.loads(request)
            return function(*arguments)

    began, cpu = time.perf_counter(), _cpu_seconds()
    answered = _guarded(call)
    answered.seconds = time.perf_counter() - began
    answered.cpu_seconds = _cpu_seconds() - cpu
    try:
        return pickle.dumps(answered)
    except Exception as error:  # noqa: BLE001 - what the environment's code put into a score
        return pickle.dumps(ScorerAnswer(failure=_failure_of(error)))


def declared() -> Declared:
    return declared_by(_environment())


def declared_by(environment: Environment) -> Declared:
    return Declared(
        limits=ScoreLimits(
            cpu_seconds=float(environment.score_cpu_seconds),
            timeout_seconds=float(environment.score_timeout_seconds),
        ),
        rewards=rules_of_rewards(environment),
        token_ids=bool(environment.scores_token_ids),
    )


def task_digests(count: int) -> list[str]:
    environment = _environment()
    _most_cpu_seconds.value = math.inf  # the limit is for scores
    return [digest_of(task) for task in first_tasks(environment, count)]


def score(task: Task, result: Result) -> Score:
    return _score_of(_environment(), task, result)


def score_rows(tasks: list[Task]) -> list[RowScore]:
    return row_scores(_environment(), tasks)


def row_scores(environment: Environment, tasks: list[Task]) -> list[RowScore]:
    rules = rules_of_rewards(environment)
    scores = []
    for task, known in environment.row_results(tasks):
        given = _guarded(lambda t=task, r=known.result: _score_of(environment, t, r))  # type: ignore[misc]
        failure, score = given.failure, given.value
        reward = None if failure else delivered_score(score, rules).reward
        why = failure.message if failure else ", ".join(n for n, v in score.metrics.items() if v)
        scores.append(
            RowScore(task.id, known.name, known.least, known.most, reward, why, bool(failure))
        )
    return scores


def score_group(task: Task, results: list[Result], scores: list[Score]) -> list[Score]:
    environment = _environment()
    with _nothing_failed_meanwhile():
        final = _awaited(environment.score_group(task, results, scores))
    rules = rules_of_rewards(environment)
    with _placed(environment.score_group):
        if not isinstance(final, list) or len(final) != len(scores):
            wrong = f"of {len(final)}" if isinstance(final, list) else f"{final!r:.50}"
            wanted = f"a list of {len(scores)} scores"
            raise reward_error(f"score_group must return {wanted}, not {wrong}.")
        return [checked_score(*pair, rules) for pair in zip(final, results, strict=True)]


def score_row(row: RowToScore) -> Score:
    environment = _environment()
    task = row.task if isinstance(row.task, Task) else environment.task_from_row(row.task)
    if not isinstance(task, Task):
        raise InputError("The environment cannot make a task from this row.")
    result = environment.response_from_row(row.response, row.messages)
    if row.finish_reason is not None:
        cut_off = row.finish_reason == "length"
        result = msgspec.structs.replace(
            result, finish_reason=row.finish_reason, truncated=result.truncated or cut_off
        )
    return _score_of(environment, task, result)


@contextmanager
def _limited_cpu() -> Iterator[None]:
    """Ends the process within the block once it and its children have used their CPU seconds."""
    if isinstance(_loaded, Environment):
        used = linux.cpu_seconds(os.getppid())
        _most_cpu_seconds.value = used + _loaded.score_cpu_seconds
    try:
        yield
    finally:
        _most_cpu_seconds.value = math.inf


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _guarded(compute: Callable[[], Any]) -> ScorerAnswer:
    try:
        return ScorerAnswer(value=compute())
    except EnvserverError as error:
        return ScorerAnswer(failure=error.failure())
    except BaseException as error:  # noqa: BLE001 - SystemExit and the like are failures too
        return ScorerAnswer(failure=_failure_of(error))


def _failure_of(error: BaseException) -> Failure:
    trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
    return Failure(
        kind=ScorerError.kind,
        blame=Blame.ENVIRONMENT,
        outcome=Outcome.RETRY,
        message=f"The scorer raised {type(error).__name__}: {str(error)[:500]} {place_of(error)}",
        detail={
            "traceback": trace,
            "place": "",  # it is in the message
            **may_be_bug(error),
            **bug_of(error),
        },
    )


def _make_scorer(env_reference: str, env_config: dict[str, Any], rubric: str | None) -> Environment:
    environment = _make_environment(env_reference, env_config)
    if _sandboxes is not None:
        environment.sandboxes = _sandboxes
    environment.judge = _judge
    environment.prepare_scoring()  # also with a rubric, which may ask the environment
    if rubric is None:
        return environment
    scorer = with_rubric(environment, rubric)
    scorer.prepare_scoring()
    return scorer


def _make_environment(env_reference: str, env_config: dict[str, Any]) -> Environment:
    environment_class = find(env_reference)
    try:
        return environment_class(environment_class.Config.model_validate(env_config))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"Setting {place!r} of {env_reference}: {first['msg']}.") from error


def _environment() -> Environment:
    if isinstance(_loaded, Failure):
        raise ConfigError(_loaded.message, hint=_loaded.hint, **_loaded.detail)
    if _loaded is None:
        raise ScorerError("The scorer process has no environment.")
    return _loaded


def _score_of(environment: Environment, task: Task, result: Result) -> Score:
    with _nothing_failed_meanwhile():
        score = _awaited(environment.score(task, result))
    rules = rules_of_rewards(environment)
    with _placed(environment.score):
        return checked_score(with_turn_rewards(score, result, rules), result, rules)


@contextmanager
def _placed(method: Callable[..., Any]) -> Iterator[None]:
    """Adds the place of `method`, which gave the scores, to a bug."""
    try:
        yield
    except RewardError as error:
        error.detail["bug"] += f" {place_of(error, method)}"
        raise


@contextmanager
def _nothing_failed_meanwhile() -> Iterator[None]:
    """Raises, at the end of the block, what a sandbox or the judge failed with, whatever the scorer
    made of it."""
    watched = [service for service in (_sandboxes, _judge) if service is not None]
    for service in watched:
        service.failure = None
    yield
    for service in watched:
        if service.failure is not None:
            raise service.failure


def _awaited(value: Any) -> Any:
    return _runner().run(_result_of(value)) if inspect.isawaitable(value) else value


async def _result_of(awaitable: Any) -> Any:
    return await awaitable


@functools.cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()
