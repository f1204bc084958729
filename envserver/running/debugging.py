"""Runs one task in this process, for a person with a debugger.

In: the parts of a run and a task. Out: the trajectory, or what the environment raised, with its own
traceback. Engine, proxy and recording are as always; only the agent and the scorer run here, where
`breakpoint()` reaches the terminal.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
from envserver_records.errors import ConfigError, EnvserverError, RolloutError
from envserver_records.records import Result, Score, Task, Trajectory

from ..environment import Environment
from ..judges.client import ScorerJudge
from ..rollouts.group import Member, RolloutContext, run_once, trajectory_of
from ..rollouts.rewards import checked_score, rules_of_rewards, with_turn_rewards
from ..rollouts.stream import GroupRequest
from ..workers.debugging import DebugPool
from .mix import RunSpec
from .run_settings import ReplaySettings, RunSettings

S = TypeVar("S", RunSettings, ReplaySettings)

_UNHURRIED_SECONDS = 7 * 86400.0


class EnvironmentRaised(Exception):
    """The environment's code raised while it was debugged.

    Args:
        error: what it raised; its traceback begins in the environment's code.
        place: "tasks", "prepare_scoring", "rollout" or "score".
    """

    def __init__(self, error: Exception, place: str, environment: type[Environment]) -> None:
        super().__init__(f"{place} raised {type(error).__name__}: {error}")
        self.error = error.with_traceback(_own_frames(error.__traceback__, environment))
        self.place = place


def debuggable(spec: RunSpec[S], *, here: bool = True) -> RunSpec[S]:
    """Returns `spec` without a time limit for rollouts.

    Args:
        here: the environment is to run in this process.
    """
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
    """Runs and scores the task of `request` once, in this process.

    Args:
        context: without scorer processes (`rollout_context(scores_here=True)`).
        scored: its answer is known; else its score has no reward.
    """
    pool = DebugPool(stops=False)
    here = msgspec.structs.replace(context, pool=pool)
    judge = context.scorer.judge
    if scored:
        if judge is not None:
            environment.judge = ScorerJudge(judge.register(nullcontext))
        _prepare_scoring(environment)
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
        score = await _scored(environment, request.task, finished.result, in_thread=in_thread)
    return trajectory_of(context, request, 0, Member(1, finished, score), score)


def _prepare_scoring(environment: Environment) -> None:
    """Raises EnvironmentRaised if the environment's method raises."""
    try:
        environment.prepare_scoring()
    except EnvserverError:
        raise
    except Exception as error:  # noqa: BLE001 - the environment's code
        raise EnvironmentRaised(error, "prepare_scoring", type(environment)) from None


async def _scored(
    environment: Environment, task: Task, result: Result, *, in_thread: bool
) -> Score:
    """Scores a result.

    Args:
        in_thread: run a plain `def score` in a thread, so that the event loop goes on.
    """
    try:
        if in_thread and not inspect.iscoroutinefunction(environment.score):
            score = await asyncio.to_thread(environment.score, task, result)
        else:
            score = environment.score(task, result)
        if inspect.isawaitable(score):
            score = await score
    except RolloutError:
        raise
    except Exception as error:  # noqa: BLE001 - the environment's code
        raise EnvironmentRaised(error, "score", type(environment)) from None
    rules = rules_of_rewards(environment)
    return checked_score(with_turn_rewards(score, result, rules), result, rules)


def _own_frames(
    trace: TracebackType | None, environment: type[Environment]
) -> TracebackType | None:
    """Returns the traceback from the environment's first frame on; all of it if there is none."""
    folder = Path(inspect.getfile(environment)).resolve().parent
    first = trace
    while first is not None:
        if folder in Path(first.tb_frame.f_code.co_filename).resolve().parents:
            return first
        first = first.tb_next
    return trace
