"""Computes how much better each row of a group was than the others of its agent.

`envserver_records.returns` has the formulas of one group, which the server's exports share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from envserver_records import ConfigError
from envserver_records.returns import Baseline as Baseline
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

    @property
    def teaches(self) -> bool:
        return bool(self.value if self.tokens is None else self.tokens.any())


@dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages. Raises ConfigError: two of the settings contradict each
    other."""

    scaling: Scaling = "std"
    baseline: Baseline = "group"
    whiten: bool = False
    turn_discount: float | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    overlong_tokens: int | None = None
    overlong_buffer: int = 4096
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        for problem, hint in self._contradictions():
            raise ConfigError(problem, hint=hint)

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        if self.baseline == "none" and self.scaling == "std":
            yield (
                "advantage std needs a baseline: without it rewards are not compared in the group.",
                "Use --advantage mean, with --whiten to compare them over the batch.",
            )
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            yield "overlong_buffer is more than overlong_tokens.", "It is their last part."
        if self.reward_weights and self.turn_discount is not None:
            yield (
                "reward_weights is not for turn_discount: named rewards are of whole trajectories.",
                "Leave one of them out.",
            )
        if self.reward_weights and self.overlong_tokens is not None:
            yield (
                "reward_weights is not for overlong_tokens, which changes the sum of the rewards.",
                "Let the environment give a reward for the length.",
            )


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


def overlong_rewards(rows: Sequence[Row], rules: AdvantageSettings) -> dict[Key, float]:
    """Returns the rewards of a group, with a penalty for long answers.

    An answer of n trained tokens gets min(0, longest - buffer - n) / buffer, at least -1, times the
    penalty (soft overlong punishment, DAPO, arXiv 2503.14476, equation 13).
    """
    rewards = rewards_of(rows)
    if rules.overlong_tokens is None:
        return rewards
    lengths: Counter[Key] = Counter()
    for row in rows:
        lengths[row.agent, row.trajectory] += int(row.mask.sum())
    free, buffer = rules.overlong_tokens - rules.overlong_buffer, max(1, rules.overlong_buffer)
    return {
        key: reward + rules.overlong_penalty * max(-1.0, min(0.0, (free - lengths[key]) / buffer))
        for key, reward in rewards.items()
    }


def group_advantages(
    rows: Sequence[Row], rules: AdvantageSettings, shuffle: np.random.Generator | None = None
) -> list[RowAdvantage]:
    """The advantage of each row of a group, before the batch is whitened.

    `shuffle` shuffles the rewards of each agent. Raises ConfigError: a row lacks a reward that
    `reward_weights` names.
    """
    if rules.reward_weights:
        return _weighed_advantages(rows, rules, shuffle)
    return row_advantages(
        rows,
        rules.scaling,
        baseline=rules.baseline,
        turn_discount=rules.turn_discount,
        rewards=shuffled_rewards(overlong_rewards(rows, rules), shuffle),
    )


def row_advantages(
    rows: Sequence[Row],
    scaling: Scaling = "std",
    *,
    baseline: Baseline = "group",
    turn_discount: float | None = None,
    rewards: Mapping[Key, float] | None = None,
) -> list[RowAdvantage]:
    """Returns the advantage of each row of a group, compared within its agent.

    `turn_discount`: learn each turn from its own return, discounted so; None: from the reward.
    `rewards`: instead of the rows' own, such as shuffled ones.
    """
    given = rewards_of(rows) if rewards is None else rewards
    values: dict[Key, float] = {}
    by_call: dict[Key, dict[int, float]] = {}
    for agent in dict.fromkeys(row.agent for row in rows):
        keys = [key for key in given if key[0] == agent]
        found = advantages([given[key] for key in keys], scaling, baseline)
        values |= zip(keys, found.tolist(), strict=True)
        if turn_discount is not None:
            earned = [_earned(rows, key, given[key]) for key in keys]
            by_turn = turn_advantages(earned, scaling, turn_discount, baseline)
            by_call |= zip(keys, by_turn, strict=True)
    return [_of_row(row, values, by_call) for row in rows]


def whitened(rows: Sequence[Row], found: Sequence[RowAdvantage]) -> list[RowAdvantage]:
    """Returns the advantages of a batch less their mean, divided by their standard deviation, both
    over its trained tokens (REINFORCE++, arXiv 2501.03262).

    They stay as they are if all are equal. The variance is divided by n - 1, as verl does.
    """
    trained = [
        np.full(int(row.mask.sum()), advantage.value)
        if advantage.tokens is None
        else advantage.tokens[row.mask == 1].astype(np.float64)
        for row, advantage in zip(rows, found, strict=True)
    ]
    values = np.concatenate(trained) if trained else np.zeros(0)
    if len(values) < 2 or np.ptp(values) == 0:
        return list(found)
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    return [
        RowAdvantage(
            (advantage.value - mean) / spread,
            None
            if advantage.tokens is None
            else ((advantage.tokens - mean) / spread).astype(np.float32),
        )
        for advantage in found
    ]


def _weighed_advantages(
    rows: Sequence[Row], rules: AdvantageSettings, shuffle: np.random.Generator | None
) -> list[RowAdvantage]:
    """Adds up the advantages of named rewards, each compared in the group by itself (GDPO, arXiv
    2601.05242)."""
    total = np.zeros(len(rows))
    for name, weight in rules.reward_weights.items():
        if any(name not in row.components for row in rows):
            known = sorted({known for row in rows for known in row.components})
            raise ConfigError(
                f"Rows of group {rows[0].group_id} have no reward named {name}.",
                hint=f"Their named rewards: {', '.join(known) or 'none'}.",
            )
        given = {(row.agent, row.trajectory): row.components[name] for row in rows}
        found = row_advantages(
            rows,
            rules.scaling,
            baseline=rules.baseline,
            rewards=shuffled_rewards(given, shuffle),
        )
        total += weight * np.array([advantage.value for advantage in found])
    return [RowAdvantage(float(value)) for value in total]


def shuffled(rewards: Sequence[float], rng: np.random.Generator) -> list[float]:
    """For control experiments: mean and spread stay, but rewards no longer belong to
    trajectories."""
    return [float(reward) for reward in rng.permutation(np.asarray(rewards, np.float64))]


def _earned(rows: Sequence[Row], key: Key, reward: float) -> Earned:
    row = next(row for row in rows if (row.agent, row.trajectory) == key)
    return Earned(reward, row.turns, row.turn_rewards)


def _of_row(
    row: Row, values: Mapping[Key, float], by_call: Mapping[Key, Mapping[int, float]]
) -> RowAdvantage:
    key = (row.agent, row.trajectory)
    turns, value = by_call.get(key), row.share * values[key]
    if not turns or len(row.calls) != len(row.tokens):
        return RowAdvantage(value)
    return RowAdvantage(value, row.share * token_advantages(row.calls, turns, values[key]))
