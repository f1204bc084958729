"""Computes how much better a trajectory was than the others of its group.

In: rewards. Out: advantages, float32, one per reward. What always holds: they add up to 0, and are
all 0 if the rewards are equal: such a group teaches nothing, and rounding errors are not amplified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Scaling = Literal["std", "mean"]
"""std: `(r - mean) / std`, as in GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
mean: `r - mean`, without the division, because the division gives very easy and very hard tasks
more weight (Dr. GRPO, arXiv 2503.20783, section 3.1)."""

_LEAST_STD: Final = 1e-4
"""Added to the standard deviation."""


def advantages(rewards: Sequence[float], scaling: Scaling = "std") -> NDArray[np.float32]:
    """Returns the advantages of one group's trajectories.

    Args:
        rewards: one per trajectory of the group; not empty.
        scaling: see `Scaling`; the standard deviation is the population's (divided by n).
    """
    values = np.asarray(rewards, np.float64)
    if values.max() == values.min():
        return np.zeros(len(values), np.float32)
    centred = values - values.mean()
    if scaling == "std":
        centred /= values.std() + _LEAST_STD
    found: NDArray[np.float32] = centred.astype(np.float32)
    return found


def shuffled(rewards: Sequence[float], rng: np.random.Generator) -> list[float]:
    """Returns the same rewards in random order, from which nothing can be learned.

    For control experiments: mean and spread stay, but rewards no longer belong to trajectories.
    """
    return [float(reward) for reward in rng.permutation(np.asarray(rewards, np.float64))]
