"""Runs one sample of an Inspect task, in a worker.

In: the task, a sample and the rollout. Out: what the solver left, and the values of the scorers if
they run here. Inspect's own limits and errors become envserver's; every model call goes through
the rollout's endpoint.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, cast

from inspect_ai import Task, eval_async, task_with
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalSample, read_eval_log_async
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.model._model import active_model, init_active_model
from inspect_ai.scorer import Score, Scorer, Target, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from pydantic import BaseModel

from envserver import AgentError, ConfigError, LimitReached, Rollout

from .sandboxes import SPEC, current_run
from .scoring import State, named_scorers, state_of

_LIMITS = {
    "message": "turns",
    "turn": "turns",
    "custom": "turns",
    "token": "tokens",
    "cost": "tokens",
    "time": "time",
    "working": "time",
    "context": "context",
    "operator": "refused",
}
"""envserver's names of Inspect's limits."""
_SOLVING_SHARE, _SCORED_HERE_SHARE = 0.95, 0.6
"""Share of the rollout's time for the solver. Inspect lets scorers take half as much again."""


class Outcome(BaseModel):
    """What `run_sample` returns.

    Args:
        state: what the solver left; None: it did not come so far.
        values: of the scorers that have run here, by name.
        error: what ended the sample.
    """

    state: State | None = None
    values: dict[str, Any] = {}
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns it as the output of a rollout."""
        return self.model_dump(mode="json", exclude_none=True)


async def run_sample(
    task: Task,
    sample: Sample,
    run: Rollout,
    *,
    scored: bool,
    image: str | None,
    roles: Sequence[str],
) -> Outcome:
    """Runs the solver, and the scorers if `scored`.

    Args:
        image: of the sample's sandbox, see `sandboxes.image_of`.
        roles: the agents that models of other roles are.
    """
    outcome = Outcome()
    grader = _model(run, "grader") if "grader" in roles else None
    change = {"sandbox": SPEC if image is not None else None}
    sample = sample.model_copy(update=change if scored else change | {"target": ""})
    withheld = _Withheld()
    setup = [*([] if scored else [_withholds(withheld)]), *_solvers(task.setup)]
    share = _SCORED_HERE_SHARE if scored else _SOLVING_SHARE
    left = max(1, int(run.seconds_left * share))
    arranged = task_with(
        copy.copy(task),
        dataset=MemoryDataset([sample], name=task.dataset.name),
        setup=setup,
        scorer=_recorders(task, sample.metadata or {}, outcome, grader)
        if scored
        else [_state_recorder(sample.metadata or {}, outcome, withheld)],
        metrics=None,
        model=None,
        sandbox=None,
        time_limit=min(left, task.time_limit or left),
    )
    token = current_run.set((run, image or ""))
    try:
        with tempfile.TemporaryDirectory(prefix="inspect-") as folder:
            logs = await eval_async(
                arranged,
                model=_model(run),
                model_roles={role: _model(run, role) for role in roles},
                epochs=1,
                score_on_error=True,
                fail_on_error=False,
                log_dir=folder,
                log_realtime=False,
                log_images=False,
                ctl_server=False,
                score_display=False,
            )
            # logs[0].samples would be read by an event loop within this one.
            log = await read_eval_log_async(logs[0].location)
    finally:
        current_run.reset(token)
    if withheld.wanted:
        raise _needs_target()
    if not log.samples:
        error = log.error
        raise AgentError(f"Inspect ran no sample: {error.message if error else 'no error'}")
    return _judged(log.samples[0], outcome)


def _judged(done: EvalSample, outcome: Outcome) -> Outcome:
    """Returns the outcome of a sample that ended by itself; raises like `run_sample`."""
    if done.error is not None:
        outcome.error = done.error.message
        raise AgentError(
            f"The sample's error: {done.error.message}\n{done.error.traceback[-4000:]}",
            output=outcome.as_json(),
        )
    if done.limit is not None:
        name = _LIMITS.get(done.limit.type, "turns")
        raise LimitReached(
            f"The task's limit: {done.limit.reason or done.limit.type}",
            limit=name,
            output=outcome.as_json(),
        )
    return outcome


def _solvers(setup: Any) -> list[Solver]:
    if setup is None:
        return []
    return list(setup) if isinstance(setup, Sequence) else [setup]


def _model(run: Rollout, role: str | None = None) -> Model:
    return get_model(
        f"openai-api/envserver/{run.model}",
        base_url=run.base_url if role is None else run.base_url_of(role),
        api_key=run.api_key,
        memoize=False,
        config=GenerateConfig(max_retries=0),
        max_retries=0,
        strict_tools=False,
    )


@solver  # type: ignore[untyped-decorator, unused-ignore]
def _withholds(target: _Withheld) -> Solver:
    """Puts `target` in the place of the sample's."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state._target = target
        return state

    return solve


class _Withheld(Target):  # type: ignore[misc] # Inspect is not installed here
    """The target of a sample that another process scores; `wanted`: a solver read it."""

    def __init__(self) -> None:
        self.wanted = False

    @property
    def target(self) -> list[str]:
        self.wanted = True
        raise _needs_target()


def _needs_target() -> ConfigError:
    return ConfigError(
        "This task's solver reads the target of its sample, or scores by itself.",
        hint="--env.scoring rollout gives the target to the worker.",
    )


def _recorders(
    task: Task, before: Mapping[str, Any], outcome: Outcome, grader: Model | None
) -> list[Scorer]:
    """Returns scorers that record the state and what the task's own give.

    A solver that scores calls them, too; the last call is the one after it.
    """
    return [
        _recorder(name, own, before, outcome, grader) for name, own in named_scorers(task).items()
    ]


def _state_recorder(before: Mapping[str, Any], outcome: Outcome, withheld: _Withheld) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        if not state.completed:  # the solver scores
            withheld.wanted = True
            raise _needs_target()
        outcome.state = state_of(state, before)
        return Score(value=0)

    return cast(Scorer, scorer(metrics=[], name="state")(lambda: score)())


def _recorder(
    name: str, own: Scorer, before: Mapping[str, Any], outcome: Outcome, grader: Model | None
) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score | None:
        outcome.state = state_of(state, before)
        solving = active_model()
        init_active_model(grader or solving, GenerateConfig())
        try:
            made: Score | None = await own(state, target)
        finally:
            init_active_model(solving, GenerateConfig())
        outcome.values[name] = None if made is None else made.value
        return made

    return cast(Scorer, scorer(metrics=[], name=name)(lambda: score)())
