"""Advantages of trajectories and of single turns over their group. Pure.

With a baseline, the advantages of a turn add up to 0 over the compared trajectories, and are all 0
if their rewards are equal (rounding errors are not amplified). Agents are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Scaling = Literal["std", "mean"]
"""std: `(r - mean) / std`, as in GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
mean: `r - mean`, without the division, because the division gives very easy and very hard tasks
more weight (Dr. GRPO, arXiv 2503.20783, section 3.1)."""

Baseline = Literal["group", "leave_one_out", "none"]
"""The baseline of a reward.

group: the mean of the group (GRPO). leave_one_out: the mean of the others in the group, which does
not depend on the trajectory's own reward (RLOO, arXiv 2402.14740): n / (n - 1) times
the former. none: nothing, for rewards that are compared over the batch (REINFORCE++, arXiv
2501.03262)."""

_LEAST_STD: Final = 1e-4
"""Added to the standard deviation."""


class Earned(NamedTuple):
    """The rewards of one agent in one trajectory.

    `reward` is the outcome and the rewards of turns together. `turns`: the agent's calls in order.
    `turn_rewards`: by call; those of calls that `turns` lacks count in the outcome.
    """

    reward: float
    turns: Sequence[int] = ()
    turn_rewards: Mapping[int, float] = {}

    def returns(self, discount: float = 1.0) -> list[float]:
        """Returns, for each turn, its reward and the discounted rewards of what follows.

        The outcome comes with the last turn. With a discount of 1 the first return is `reward`.
        """
        own = [self.turn_rewards.get(call, 0.0) for call in self.turns]
        follows = self.reward - math.fsum(own)
        returns: list[float] = []
        for number, reward in enumerate(reversed(own)):
            follows = reward + (follows if number == 0 else discount * follows)
            returns.append(follows)
        return returns[::-1]


def advantages(
    rewards: Sequence[float], scaling: Scaling = "std", baseline: Baseline = "group"
) -> NDArray[np.float32]:
    """Returns the advantages of the trajectories of one agent in one group, float32.

    The standard deviation is the population's (divided by n).
    """
    values = np.asarray(rewards, np.float64)
    spread = 0.0 if values.max() == values.min() else float(values.std())
    if baseline != "none":
        if not spread:
            return np.zeros(len(values), np.float32)
        values = values - values.mean()
        if baseline == "leave_one_out":
            values *= len(values) / (len(values) - 1)
    if scaling == "std" and spread:
        values = values / (spread + _LEAST_STD)
    found: NDArray[np.float32] = values.astype(np.float32)
    return found


def turn_advantages(
    earned: Sequence[Earned],
    scaling: Scaling = "std",
    discount: float = 1.0,
    baseline: Baseline = "group",
) -> list[dict[int, float]]:
    """Returns the advantage of each call of each trajectory, by the number of the call.

    The return of a turn is compared with those of the same turn in the other trajectories, and with
    the last return of those that had fewer turns. So without rewards of turns and with a discount
    of 1 each call has the advantage of its trajectory.
    """
    returns = [credits.returns(discount) or [credits.reward] for credits in earned]
    longest = max(map(len, returns))
    by_turn = [
        advantages([own[min(turn, len(own) - 1)] for own in returns], scaling, baseline)
        for turn in range(longest)
    ]
    return [
        {call: float(by_turn[turn][number]) for turn, call in enumerate(credits.turns)}
        for number, credits in enumerate(earned)
    ]


def token_advantages(
    calls: NDArray[np.int32], by_call: Mapping[int, float], otherwise: float
) -> NDArray[np.float32]:
    """Returns the advantage of each token of a row, float32[T] (`calls`: int32[T])."""
    found = np.full(len(calls), otherwise, np.float32)
    for call, advantage in by_call.items():
        found[calls == call] = advantage
    return found
