"""Which task comes next: decisions from estimates, settings and seeded chance. Pure.

A run's stream of tasks is the environment's own order, into which tasks of before come again:

- `difficulty`: a remembered task is drawn by w(p) = (p/t)^(st) ((1-p)/(1-t))^(s(1-t)), at most 1,
  where p is its chance of success, t the target and s the sharpness (t = 1/2, s = 2: 4p(1-p), what
  T. Foster and J. Foerster call learnability, "Learning to reason at the frontier of learnability",
  arXiv:2502.12272, 2025). It comes again with that chance too, else the environment's order goes
  on: where all that is remembered is too easy or too hard, most tasks are new.
- `replay`: with a fixed chance a remembered task that is unsolved comes again.

What holds: the environment's own order goes on with at least the share that is set, so that no task
waits for ever; where others are remembered, a task that has just come rests; the same seed,
estimates and settings decide the same.
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
        estimate: None while nothing of it was scored.
        drawn: number of the group that it had last.
    """

    task_id: str
    estimate: Estimate | None
    drawn: int


def wanted(success: float, target: float, sharpness: float) -> float:
    """How much a task is wanted whose chance of success is `success`, in (0, 1); at most 1."""
    easy = (success / target) ** (sharpness * target)
    return float(easy * ((1.0 - success) / (1.0 - target)) ** (sharpness * (1.0 - target)))


def choose(
    candidates: Sequence[Candidate], rules: CurriculumConfig, rng: random.Random, number: int
) -> str | None:
    """The task that comes again as group `number`; None: the environment's own order goes on."""
    if rules.sampler == "difficulty":
        return _near_target(candidates, rules, rng, number)
    if rules.sampler == "replay":
        return _unsolved(candidates, rules, rng, number)
    return None


def is_passed_over(estimate: Estimate | None, rules: CurriculumConfig, rng: random.Random) -> bool:
    """Whether a task to which the environment's order comes gets no group this time."""
    if rules.solved_above is None or estimate is None:
        return False
    is_known = estimate.attempts >= rules.solved_attempts
    is_solved = is_known and estimate.success > rules.solved_above
    return is_solved and rng.random() >= rules.solved_share


def to_forget(candidates: Sequence[Candidate], rules: CurriculumConfig, count: int) -> list[str]:
    """Which `count` of `candidates` are remembered no longer: those that are wanted least; of those
    that are wanted alike, or not yet scored, those that were not drawn for longest."""

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
    """One of which nothing holds any more was unsolved when it was remembered, or is so far."""
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
