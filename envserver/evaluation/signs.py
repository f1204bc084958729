"""Is a mean difference more than chance? The paired sign-flip test. Pure.

Without a difference between two runs, each pair's difference could as well have the other sign. The
p-value is the share of all 2**n choices of signs whose sum is at least as far from 0 as the
observed one. For differences of 1 and -1 that is McNemar's exact test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

DRAWS: Final = 100_000
_MOST_ENUMERATED: Final = 16
_LARGEST_SUM: Final = 2_000_000
_LARGEST_WORK: Final = 200_000_000
_ROUNDING: Final = 1e-9
_ROWS_AT_ONCE: Final = 2_000
_SCALES: Final = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 28, 32, 36, 48, 56, 60, 64, 72, 100),
    *(120, 128, 420, 840, 1000, 5040),
)
"""Candidate numbers of steps in a difference of 1."""


class SignTest(msgspec.Struct, frozen=True, kw_only=True):
    """A two-sided test of "the mean difference is 0".

    Args:
        exact: over all choices of signs, not over `DRAWS` random ones.
    """

    p_value: float
    exact: bool


def sign_flip_test(differences: Sequence[float], *, seed: int = 0) -> SignTest:
    """The test of paired differences; those of 0 say nothing, and without any other p is 1.

    Args:
        seed: of the random signs, where there are too many choices to take them all.
    """
    counted = [difference for difference in differences if abs(difference) > _ROUNDING]
    if not counted:
        return SignTest(p_value=1.0, exact=True)
    values, seen = np.abs(np.asarray(counted, np.float64)), abs(float(sum(counted)))
    if (steps := _whole(values)) is not None:
        return SignTest(p_value=_exact_of_steps(*steps, seen), exact=True)
    if len(values) <= _MOST_ENUMERATED:
        return SignTest(p_value=_enumerated(values, seen), exact=True)
    return SignTest(p_value=_drawn(values, seen, seed), exact=False)


def _whole(values: np.ndarray) -> tuple[np.ndarray, int] | None:
    """`values` as whole numbers of steps, and how many steps are 1; None: there is no such step.

    Rewards of 0 and 1 over k attempts differ by whole numbers of 1/k.
    """
    for scale in _SCALES:
        scaled = values * scale
        steps = np.rint(scaled)
        if np.all(np.abs(scaled - steps) < _ROUNDING):
            total = int(steps.sum())
            fits = total <= _LARGEST_SUM and total * len(values) <= _LARGEST_WORK
            return (steps.astype(np.int64), scale) if fits else None
    return None


def _exact_of_steps(steps: np.ndarray, scale: int, seen: float) -> float:
    """The distribution of the sum of signed steps, one task after the other."""
    chances = np.ones(1)
    for step in steps.tolist():
        wider = np.zeros(len(chances) + 2 * step)
        wider[: len(chances)] += chances / 2
        wider[2 * step :] += chances / 2
        chances = wider
    middle = (len(chances) - 1) // 2
    sums = np.abs(np.arange(len(chances)) - middle)
    return min(1.0, float(chances[sums >= round(seen * scale)].sum()))


def _enumerated(values: np.ndarray, seen: float) -> float:
    sums = np.zeros(1)
    for value in values.tolist():
        sums = np.concatenate([sums - value, sums + value])
    return float(np.mean(np.abs(sums) >= seen - _ROUNDING))


def _drawn(values: np.ndarray, seen: float, seed: int) -> float:
    """The seen signs count as one of the draws, so that p is never 0."""
    rng = np.random.default_rng(seed)
    hits = 0
    for start in range(0, DRAWS, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, DRAWS - start)
        signs = rng.integers(0, 2, size=(rows, len(values)), dtype=np.int8) * 2 - 1
        hits += int(np.sum(np.abs(signs @ values) >= seen - _ROUNDING))
    return (1 + hits) / (1 + DRAWS)
