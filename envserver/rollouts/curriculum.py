"""Chooses the next task from estimates, settings and a seeded random generator. Pure.

A run's stream of tasks is the environment's own order, with earlier tasks mixed in:

- `difficulty`: a remembered task is drawn with w(p) = (p/t)^(st) ((1-p)/(1-t))^(s(1-t)), at most 1,
  where p is its chance of success, t the target and s the sharpness (t = 1/2, s = 2: 4p(1-p), what
  T. Foster and J. Foerster call learnability, "Learning to reason at the frontier of learnability",
  arXiv:2502.12272, 2025). It is repeated with that probability, too; otherwise the environment's
  order continues: if all remembered tasks are too easy or too hard, most tasks are new.
- `replay`: with a fixed probability, a remembered unsolved task is repeated.

What always holds: the environment's own order gets at least the configured share, so that no task
waits forever; a task that has just run rests while others are remembered; the same seed, estimates
and settings give the same choices.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Final

import msgspec

from ..curriculum_config import CurriculumConfig
from .estimates import Estimate

LONGEST_REST: Final = 32
"""Maximum number of groups before a task may be repeated."""


class Candidate(msgspec.Struct, frozen=True):
    """A remembered task.

    Args:
        estimate: None until one of its rollouts is scored.
        drawn: number of its last group.
    """

    task_id: str
    estimate: Estimate | None
    drawn: int


def wanted(success: float, target: float, sharpness: float) -> float:
    """Returns the weight of a task with chance `success` in (0, 1); at most 1."""
    easy = (success / target) ** (sharpness * target)
    return float(easy * ((1.0 - success) / (1.0 - target)) ** (sharpness * (1.0 - target)))


def choose(
    candidates: Sequence[Candidate], rules: CurriculumConfig, rng: random.Random, number: int
) -> str | None:
    """Returns the task to repeat as group `number`; None: continue the environment's own order."""
    if rules.sampler == "difficulty":
        return _near_target(candidates, rules, rng, number)
    if rules.sampler == "replay":
        return _unsolved(candidates, rules, rng, number)
    return None


def is_passed_over(estimate: Estimate | None, rules: CurriculumConfig, rng: random.Random) -> bool:
    """Returns whether the next task in the environment's order is skipped this time: it is solved
    too often, or lately never, so its group would teach nothing."""
    if estimate is None or estimate.attempts < rules.solved_attempts:
        return False
    if rules.solved_above is not None and estimate.success > rules.solved_above:
        return rng.random() >= rules.solved_share
    # What old policies did fades: then it is tried again.
    is_recent = 2 * estimate.weight >= rules.solved_attempts
    if rules.unsolved_share < 1 and is_recent and _is_unsolved(estimate, rules):
        return rng.random() >= rules.unsolved_share
    return False


def to_forget(candidates: Sequence[Candidate], rules: CurriculumConfig, count: int) -> list[str]:
    """Returns the `count` candidates to forget: those with the lowest weight.

    Among equal weights, and among tasks not yet scored, the least recently drawn go first.
    """

    def worth(one: Candidate) -> tuple[float, int]:
        if one.estimate is None:
            return (2.0, one.drawn)
        if rules.sampler == "replay":
            return (float(_is_unsolved(one.estimate, rules)), one.drawn)
        return (wanted(one.estimate.success, rules.target, rules.sharpness), one.drawn)

    return [one.task_id for one in heapq.nsmallest(count, candidates, key=worth)]


def _near_target(
    candidates: Sequence[Candidate], rules: CurriculumConfig, rng: random.Random, number: int
) -> str | None:
    explores, luck = rng.random() < rules.explore, rng.random()
    rested = [] if explores else _rested(candidates, number)
    weights = [wanted(one.success, rules.target, rules.sharpness) for _, one in rested]
    if not weights or not sum(weights):
        return None
    (index,) = rng.choices(range(len(rested)), weights)
    return rested[index][0] if luck < weights[index] else None


def _unsolved(
    candidates: Sequence[Candidate], rules: CurriculumConfig, rng: random.Random, number: int
) -> str | None:
    if rng.random() >= rules.replay_share:
        return None
    rested = [(of, one) for of, one in _rested(candidates, number) if _is_unsolved(one, rules)]
    if not rested:
        return None
    if rules.replay_order == "weighted":
        return rng.choices([of for of, _ in rested], [one.variance for _, one in rested])[0]
    drawn = {one.task_id: one.drawn for one in candidates}
    return min(rested, key=lambda pair: drawn[pair[0]])[0]


def _is_unsolved(estimate: Estimate, rules: CurriculumConfig) -> bool:
    """Whether the task is unsolved. A task without current weight was unsolved when last tried."""
    mean = estimate.mean_reward
    return mean is None or mean <= rules.unsolved_below


def _rested(candidates: Sequence[Candidate], number: int) -> list[tuple[str, Estimate]]:
    """Returns the scored tasks that may be repeated, with their estimates."""
    rest = min(LONGEST_REST, len(candidates) // 2)
    return [
        (one.task_id, one.estimate)
        for one in candidates
        if one.estimate is not None and one.drawn + rest < number
    ]
