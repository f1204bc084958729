"""Counts what a run produced, for the HTML page and the data card.

In: groups and their kept rollouts. Out: counts, sums and a histogram. What holds: memory is
bounded, however long the run is; names beyond `MOST_NAMES` are counted as `OTHER`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from envserver_records.scores import RewardRange

from .stored import StoredGroup, StoredRollout

MOST_NAMES: Final = 50
OTHER: Final = "(others)"
BINS: Final = 10


@dataclass
class Part:
    """Counts of rollouts that belong together."""

    groups: int = 0
    rollouts: int = 0
    scored: int = 0
    reward: float = 0.0

    @property
    def mean_reward(self) -> float | None:
        """The mean reward, or None if nothing is scored."""
        return self.reward / self.scored if self.scored else None


@dataclass
class RunFacts:
    """Counts of a run. Add each group once.

    Args:
        rows, tokens, sampled: training rows, their tokens, and the trained ones among them.
        solved: rollouts with the reward of a solved task.
        axis: the rewards that the histogram goes from and to, those that the environment declares;
            None: it has rollouts with several ranges, and goes from the lowest to the highest
            reward of each.
        histogram: rollouts by reward, in equal parts of the axis; `below` and `above` it.
        ends: by finish reason, or by the limit that was reached.
        failures: failed attempts by kind; `lost`: missing rollouts by kind.
        first_at, last_at: when groups were made, `time.time()`.
    """

    total: Part = field(default_factory=Part)
    by_env: dict[str, Part] = field(default_factory=dict)
    models: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    axis: tuple[float, float] | None = (0.0, 1.0)
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)
    below: int = 0
    above: int = 0
    solved: int = 0
    truncated: int = 0
    turns: int = 0
    rows: int = 0
    tokens: int = 0
    sampled: int = 0
    seconds: float = 0.0
    versions: tuple[int, int] | None = None
    first_at: float | None = None
    last_at: float | None = None

    def add(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> None:
        """Counts `kept` of `group`, and the facts about the group as a whole."""
        for failure in group.failures:
            _count(self.failures, str(failure.get("kind", "")))
        for kind, number in group.lost.items():
            _count(self.lost, kind, number)
        if not kept:
            return
        for part in (self.total, self._part(kept[0].env)):
            part.groups += 1
        self._add_time(kept[0].created_at)
        for rollout in kept:
            self._add(rollout)

    def as_json(self) -> dict[str, Any]:
        """Returns the counts for programs."""
        return {
            "groups": self.total.groups,
            "rollouts": self.total.rollouts,
            "mean_reward": self.total.mean_reward,
            "reward_histogram": self.histogram,
            "reward_axis": self.axis,
            "training_rows": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.sampled,
            "truncated": self.truncated,
            "environments": {name: part.rollouts for name, part in self.by_env.items()},
            "models": dict(self.models),
            "policy_versions": None if self.versions is None else list(self.versions),
        }

    def bins(self) -> list[tuple[str, int]]:
        """Returns the parts of the histogram with their names: "0.0 to 0.1"."""
        low, high = self.axis or (0.0, 100.0)
        ends = [low + (high - low) * number / BINS for number in range(BINS + 1)]
        texts = [f"{end:.0f} %" if self.axis is None else f"{end:.4g}" for end in ends]
        if self.axis is not None and all(float(text) == round(float(text), 1) for text in texts):
            texts = [f"{end:.1f}" for end in ends]
        return [
            (f"{one} to {two}", count)
            for one, two, count in zip(texts[:-1], texts[1:], self.histogram, strict=True)
        ]

    def _add(self, rollout: StoredRollout) -> None:
        for part in (self.total, self._part(rollout.env)):
            part.rollouts += 1
            part.scored += rollout.reward is not None
            part.reward += rollout.reward or 0.0
        if rollout.reward is not None:
            self._add_reward(rollout.reward, rollout.reward_range)
        _count(self.models, rollout.model)
        _count(self.splits, rollout.split)
        _count(self.ends, rollout.limit or rollout.finish_reason or "unknown")
        for flag in rollout.flags:
            _count(self.flags, flag)
        self.truncated += rollout.truncated
        self.turns += rollout.turns
        self.rows += len(rollout.rows)
        self.tokens += sum(len(row.tokens) for row in rollout.rows)
        self.sampled += rollout.sampled
        seconds = rollout.usage.get("seconds")
        self.seconds += seconds if isinstance(seconds, int | float) else 0.0
        if rollout.policy_version >= 0:
            low, high = self.versions or (rollout.policy_version, rollout.policy_version)
            self.versions = (min(low, rollout.policy_version), max(high, rollout.policy_version))

    def _add_reward(self, reward: float, bounds: RewardRange) -> None:
        low, high = bounds.axis
        if self.total.scored == 1:
            self.axis = (low, high)
        elif self.axis != (low, high):
            self.axis = None
        self.solved += bounds.is_solved(reward)
        share = (reward - low) / (high - low)
        if not 0 <= share <= 1:
            self.below += share < 0
            self.above += share > 1
            return
        self.histogram[min(BINS - 1, math.floor(share * BINS))] += 1

    def _add_time(self, at: float) -> None:
        if at > 0:
            self.first_at = at if self.first_at is None else min(self.first_at, at)
            self.last_at = at if self.last_at is None else max(self.last_at, at)

    def _part(self, env: str) -> Part:
        if env not in self.by_env and len(self.by_env) >= MOST_NAMES:
            env = OTHER
        return self.by_env.setdefault(env, Part())


def _count(counter: Counter[str], name: str, number: int = 1) -> None:
    if name not in counter and len(counter) >= MOST_NAMES:
        name = OTHER
    counter[name] += number
