"""Scores one rollout, with one repetition, and tells whether an environment scores groups."""

from __future__ import annotations

from envserver_records.records import Result, Score, Task

from ..environment import Environment
from .costs import ScoringSpent
from .policy import is_bug
from .scoring import SCORING_FAILURES, ScorerPool


async def score_once(
    scorer: ScorerPool, task: Task, result: Result, spent: ScoringSpent | None = None
) -> Score:
    """Scores a rollout; retries a failed scorer once before the rollout fails."""
    try:
        return await scorer.score(task, result, spent)
    except SCORING_FAILURES as error:
        if is_bug(error):
            raise
        return await scorer.score(task, result, spent)


def scores_groups(environment: Environment) -> bool:
    """Returns whether `environment` scores groups as a whole."""
    return type(environment).score_group is not Environment.score_group
