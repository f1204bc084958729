"""How steady are results when the same tasks are asked in other words? Pure.

Each task has attempts at its original and at some variants; only tasks with a variant count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .estimators import Estimate, estimate


class Robustness(msgspec.Struct, frozen=True, kw_only=True):
    """Measures over tasks that were asked in several ways.

    Args:
        variants: names of the runs with other words.
        consistency: the chance that an attempt at the original and one at a variant both pass or
            both fail.
        worst_reward: mean reward of the worst way to ask, for each task.
        worst_pass: share of attempts that pass at the worst way to ask, for each task.
    """

    variants: list[str]
    consistency: Estimate
    worst_reward: Estimate
    worst_pass: Estimate


class Asked(msgspec.Struct, frozen=True):
    """Attempts at one task asked in one way: mean reward and share that passed."""

    reward: float
    passed: float


def robustness(
    original: Mapping[str, Asked], variants: Mapping[str, Mapping[str, Asked]], *, seed: int
) -> Robustness | None:
    """Measures the runs, each by task id; None if no task was asked in two ways."""
    ways = {
        task_id: [run[task_id] for run in variants.values() if task_id in run]
        for task_id in original
    }
    pairs = [(original[task_id], others) for task_id, others in ways.items() if others]
    if not pairs:
        return None
    return Robustness(
        variants=list(variants),
        consistency=estimate([_agreement(one, others) for one, others in pairs], seed=seed),
        worst_reward=estimate(
            [min(way.reward for way in (one, *others)) for one, others in pairs], seed=seed
        ),
        worst_pass=estimate(
            [min(way.passed for way in (one, *others)) for one, others in pairs], seed=seed
        ),
    )


def _agreement(one: Asked, others: Sequence[Asked]) -> float:
    chances = [
        one.passed * other.passed + (1 - one.passed) * (1 - other.passed) for other in others
    ]
    return sum(chances) / len(chances)
