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
        best: rollouts with a reward of 1.
        histogram: rollouts by reward, from [0, 0.1) to [0.9, 1]; `below` and `above` of [0, 1].
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
    histogram: list[int] = field(default_factory=lambda: [0] * BINS)
    below: int = 0
    above: int = 0
    best: int = 0
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
            "training_rows": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.sampled,
            "truncated": self.truncated,
            "environments": {name: part.rollouts for name, part in self.by_env.items()},
            "models": dict(self.models),
            "policy_versions": None if self.versions is None else list(self.versions),
        }

    def _add(self, rollout: StoredRollout) -> None:
        for part in (self.total, self._part(rollout.env)):
            part.rollouts += 1
            part.scored += rollout.reward is not None
            part.reward += rollout.reward or 0.0
        if rollout.reward is not None:
            self._add_reward(rollout.reward)
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

    def _add_reward(self, reward: float) -> None:
        self.best += reward >= 1
        if not 0 <= reward <= 1:
            self.below += reward < 0
            self.above += reward > 1
            return
        self.histogram[min(BINS - 1, math.floor(reward * BINS))] += 1

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
