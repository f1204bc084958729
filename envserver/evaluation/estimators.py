"""Estimates from several attempts at each of many tasks. Pure and deterministic.

Intervals resample tasks, never attempts: attempts at one task are not independent evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
_VALUES_AT_ONCE = 2_000_000


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks, with its 95 % interval (None for a single task)."""

    value: float
    low: float | None
    high: float | None
    tasks: int


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Returns the chance that at least one of k attempts, drawn without replacement, is a success.

    `1 - C(attempts - passed, k) / C(attempts, k)`. Average it over tasks.

    Raises:
        ValueError: k is not from 1 to `attempts`, or `passed` is not from 0 to `attempts`.
    """
    _check(attempts, passed, k)
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, passed: int, k: int) -> float:
    """Returns pass^k: the chance that all of k attempts, drawn without replacement, are successes.

    `C(passed, k) / C(attempts, k)`. Average it over tasks.

    Raises:
        ValueError: as `pass_at_k`.
    """
    _check(attempts, passed, k)
    return math.comb(passed, k) / math.comb(attempts, k)


def _check(attempts: int, passed: int, k: int) -> None:
    if k > attempts:
        raise ValueError(f"{attempts} attempts are less than k, which is {k}.")
    if k < 1 or not 0 <= passed <= attempts:
        raise ValueError(f"{passed} successes of {attempts} attempts at k = {k} are impossible.")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Returns the mean of `values`, one for each task, with its percentile bootstrap interval.

    Args:
        seed: seed of the resampling; the same seed and values give the same interval.

    Raises:
        ValueError: there are no values.
    """
    return estimate_of_means([values], seed=seed)


def estimate_of_means(groups: Sequence[Sequence[float]], *, seed: int = 0) -> Estimate:
    """Returns the mean of the groups' means with equal weights; tasks are resampled within each
    group.
    Raises ValueError: there is no group, or a group has no values."""
    if not groups or not all(groups):
        raise ValueError("The mean of no values is undefined.")
    value = math.fsum(math.fsum(values) / len(values) for values in groups) / len(groups)
    tasks = sum(map(len, groups))
    if all(len(values) == 1 for values in groups):
        return Estimate(value=value, low=None, high=None, tasks=tasks)
    drawn = [
        _resampled_means(np.asarray(values, dtype=np.float64), seed + number)
        for number, values in enumerate(groups)
    ]
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(np.mean(drawn, axis=0), [tail, 1.0 - tail])
    return Estimate(value=value, low=float(low), high=float(high), tasks=tasks)


def _resampled_means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Returns float64[RESAMPLES]; works in slices to bound memory."""
    rng = np.random.default_rng(seed)
    rows = max(1, _VALUES_AT_ONCE // len(values))
    means = [
        values[rng.integers(len(values), size=(min(rows, RESAMPLES - start), len(values)))].mean(1)
        for start in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(means)
