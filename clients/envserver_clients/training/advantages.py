"""Computes how much better each row of a group was than the others of its agent.

In: the rows of a group. Out: the advantage of each row, and of its tokens where turns are compared
one by one. `envserver_records.returns` has the formulas, which the server's exports share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from envserver_records.returns import Earned, token_advantages, turn_advantages
from envserver_records.returns import Scaling as Scaling
from envserver_records.returns import advantages as advantages
from numpy.typing import NDArray

from envserver_clients.records import Row

Key = tuple[str | None, int]
"""An agent in a trajectory of the group."""


class RowAdvantage(NamedTuple):
    """The advantage of a row: its trajectory's, and float32[T] where turns have their own."""

    value: float
    tokens: NDArray[np.float32] | None = None


def rewards_of(rows: Sequence[Row]) -> dict[Key, float]:
    """Returns the rewards of a group by agent and number of the trajectory."""
    return {(row.agent, row.trajectory): row.reward for row in rows}


def shuffled_rewards(
    rewards: Mapping[Key, float], rng: np.random.Generator | None
) -> dict[Key, float]:
    """Returns the rewards, those of each agent in random order unless `rng` is None."""
    mixed = dict(rewards)
    for agent in dict.fromkeys(agent for agent, _ in rewards) if rng is not None else ():
        keys = [key for key in rewards if key[0] == agent]
        assert rng is not None
        mixed |= dict(zip(keys, shuffled([rewards[key] for key in keys], rng), strict=True))
    return mixed


def row_advantages(
    rows: Sequence[Row],
    scaling: Scaling = "std",
    *,
    turn_discount: float | None = None,
    rewards: Mapping[Key, float] | None = None,
) -> list[RowAdvantage]:
    """Returns the advantage of each row of a group, compared within its agent.

    Args:
        turn_discount: learn each turn from its own return, discounted so; None: from the reward.
        rewards: other rewards than the rows' own, such as shuffled ones.
    """
    given = rewards_of(rows) if rewards is None else rewards
    values: dict[Key, float] = {}
    by_call: dict[Key, dict[int, float]] = {}
    for agent in dict.fromkeys(row.agent for row in rows):
        keys = [key for key in given if key[0] == agent]
        values |= zip(keys, advantages([given[key] for key in keys], scaling).tolist(), strict=True)
        if turn_discount is not None:
            earned = [_earned(rows, key, given[key]) for key in keys]
            by_call |= zip(keys, turn_advantages(earned, scaling, turn_discount), strict=True)
    return [_of_row(row, values, by_call) for row in rows]


def shuffled(rewards: Sequence[float], rng: np.random.Generator) -> list[float]:
    """Returns the same rewards in random order, from which nothing can be learned.

    For control experiments: mean and spread stay, but rewards no longer belong to trajectories.
    """
    return [float(reward) for reward in rng.permutation(np.asarray(rewards, np.float64))]


def _earned(rows: Sequence[Row], key: Key, reward: float) -> Earned:
    row = next(row for row in rows if (row.agent, row.trajectory) == key)
    return Earned(reward, row.turns, row.turn_rewards)


def _of_row(
    row: Row, values: Mapping[Key, float], by_call: Mapping[Key, Mapping[int, float]]
) -> RowAdvantage:
    key = (row.agent, row.trajectory)
    turns = by_call.get(key)
    if not turns or len(row.calls) != len(row.tokens):
        return RowAdvantage(values[key])
    return RowAdvantage(values[key], token_advantages(row.calls, turns, values[key]))
