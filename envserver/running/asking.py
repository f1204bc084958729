"""The work of `envserver run`: asks an environment's agent one question.

In: an environment and the fields of its `Question`. Out: the scored trajectory, also as a unified
document.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from envserver_records.errors import ConfigError, Failure
from envserver_records.records import Result, Trajectory
from pydantic import ValidationError

from ..config import EnvironmentConfig, Section
from ..environment import Environment
from ..export.unified import unified
from ..rollouts.single import run_single
from .context import rollout_context
from .judging import judge_line
from .run_settings import RunSettings
from .spec import RunSpec

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Answered:
    """The rollout of a question.

    Args:
        task_id: id of the task that the question became.
        document: the trajectory in the unified format.
        judge: what the judge was asked and what it cost; "" if it was not.
    """

    task_id: str
    trajectory: Trajectory
    document: dict[str, Any]
    judge: str


@dataclass(frozen=True)
class Asking:
    """A question that is ready to be run; made by `asking`."""

    spec: RunSpec[RunSettings]
    environment: Environment
    question: Environment.Question


def asking(spec: RunSpec[RunSettings]) -> Asking:
    """Makes the question and the environment from the settings of `spec`.

    Raises:
        ConfigError: the settings are not a valid question.
    """
    question = _question(spec)
    spec = _with_implied(spec, question)
    return Asking(spec, spec.make_environment(), question)


async def ask(asking: Asking, failed: Callable[[Failure], None]) -> Answered:
    """Runs one rollout of the question.

    Args:
        failed: called with each failure that is tried again.

    Raises:
        RolloutError: it failed through no fault of the model, also on retry.
        InputError: the question is invalid.
    """
    spec, environment, question = asking.spec, asking.environment, asking.question
    task = environment.task_from_question(question)
    async with rollout_context(spec.settings, environment, spec.reference) as context:
        trajectory = await run_single(context, task, scored=question.is_scored(), failed=failed)
        ended_at, model = time.time(), context.model
        asked = context.scorer.judge
        judge = judge_line(asked) if asked is not None and asked.counts.calls else ""
    document = unified(
        trajectory,
        ended_at=ended_at,
        question=question.question,
        final_answer=environment.final_answer(
            Result(output=trajectory.output, messages=trajectory.messages)
        ),
        model=model,
        seed=environment.config.seed,
        source="envserver run",
        tokens=spec.settings.include_tokens,
    )
    return Answered(task.id, trajectory, document, judge)


def _question(spec: RunSpec[RunSettings]) -> Environment.Question:
    kind = spec.environment_class.Question
    given = {name: getattr(spec.settings, name) for name in kind.model_fields}
    return _validated(kind, given, "--")


def _with_implied(
    spec: RunSpec[RunSettings], question: Environment.Question
) -> RunSpec[RunSettings]:
    """Returns `spec` with the environment settings that the question implies."""
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
        lines = [
            f"{prefix}{'.'.join(map(str, one['loc']))}: {one['msg']}."
            for one in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise ConfigError("\n".join(lines), problems=lines) from None
