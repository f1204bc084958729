"""Counts over the events of a run: groups, rewards, tokens, failures, drops, flags."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import msgspec
from envserver_records.costs import Cost, added
from envserver_records.records import Group, Usage
from envserver_records.scores import UNIT_RANGE, RewardRange

from ..rollouts.events import Event, GroupDelivered, GroupDropped, RolloutFailed, RolloutScored
from ..rollouts.policy import Untrained, summed

GROUPS_SHOWN = 12
"""Number of first groups that a tally keeps whole, to show them."""
_ALL = 0.999
"""Shares of the range of rewards from here on are shown as full rewards (floats)."""


class Rewards:
    """Statistics of the rewards of delivered groups, in constant memory.

    `none`, `full`: number of rollouts with the lowest reward and of those that solved their task.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.none = 0
        self.full = 0
        self.agents: dict[str, Rewards] = {}
        self._unit = True

    def add_group(self, group: Group) -> None:
        """Counts the rewards of a delivered group, and those of each agent by itself."""
        self._unit &= group.reward_range == UNIT_RANGE
        for trajectory in group.trajectories:
            if trajectory.score.reward is not None:
                self._add(trajectory.score.reward, group.reward_range)
            for agent, reward in trajectory.score.rewards.items():
                self.agents.setdefault(agent, Rewards())._add(reward, group.reward_range)

    def _add(self, reward: float, bounds: RewardRange) -> None:
        self.count += 1
        self.total += reward
        full = is_full(reward, bounds)
        self.none += not full and bounds.share(reward) <= 0
        self.full += full

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def __str__(self) -> str:
        between = self.count - self.none - self.full
        least, most = ("0", "1") if self._unit else ("lowest", "solved")
        counts = f"{least}: {self.none}  between: {between}  {most}: {self.full}"
        agents = [f"{agent} {mean_text(own.mean)}" for agent, own in self.agents.items()]
        return "\n".join([counts, *agents])


def is_full(reward: float, bounds: RewardRange) -> bool:
    """Returns whether `reward` is to be shown as that of a solved task: rewards are floats."""
    return bounds.is_solved(reward) or bounds.share(reward) >= _ALL


_MOST_FAILED_GROUPS: Final = 1024


class Tally:
    """Counts over the events of a run; an Observer. Rewards are those of delivered groups."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.groups = 0
        self.rollouts = 0
        self.rewards = Rewards()
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.failures: Counter[str] = Counter()
        self.last_words: dict[str, str] = {}
        """The latest message of each kind of failure, and of each reason to drop a group."""
        self.latest_failure = ""
        self._failed_groups: dict[str, str] = {}
        self.lost = 0
        self.drops: Counter[str] = Counter()
        self.flags: Counter[str] = Counter()
        self.untrained = Untrained()
        """Tokens of all scored rollouts that flags mask or drop."""
        self.first_groups: list[Group] = []
        self.latest_group: Group | None = None
        self.cost: Cost | None = None
        """Cost of all scored rollouts, without the judge; None without known prices."""
        self.sandbox_seconds = 0.0
        self.scoring_seconds = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RolloutScored):
            self.rollouts += 1
            self.completion_tokens += event.completion_tokens
            self.flags.update(event.flags)
            self.untrained = summed((self.untrained, event.untrained))
            if event.usage is not None:
                self._add_usage(event.usage)
        elif isinstance(event, RolloutFailed):
            self.failures[event.failure.kind] += 1
            self.last_words[event.failure.kind] = event.failure.message
            self.latest_failure = event.failure.message
            self._failed_groups[event.group_id] = event.failure.message
            if len(self._failed_groups) > _MOST_FAILED_GROUPS:
                del self._failed_groups[next(iter(self._failed_groups))]
            self.lost += event.final
        elif isinstance(event, GroupDropped):
            self.drops[event.reason] += 1
            if not event.failed:  # else its failed attempts say why
                self.last_words[event.reason] = event.message
        elif isinstance(event, GroupDelivered):
            self._add_group(event.group)

    def failure_of(self, group_id: str) -> str:
        """Returns the latest failure in a group, "" if it had none lately."""
        return self._failed_groups.get(group_id, "")

    def _add_usage(self, usage: Usage) -> None:
        if usage.cost is not None and usage.cost.models:
            cost = msgspec.structs.replace(usage.cost, judge=None)
            self.cost = cost if self.cost is None else added((self.cost, cost))
        self.prompt_tokens += usage.prompt_tokens
        self.scoring_seconds += usage.scoring_seconds
        self.sandbox_seconds += usage.sandbox.wall_seconds if usage.sandbox is not None else 0.0

    def costs_line(self) -> str:
        """Returns what the scored rollouts took, in one line; the judge has a line of its own."""
        parts = [f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"]
        if self.sandbox_seconds:
            parts.append(f"{self.sandbox_seconds:.1f} s in sandboxes")
        parts.append(f"{self.scoring_seconds:.1f} s of scoring")
        if self.cost is not None:
            parts.append(f"{self.cost.total:.4f} {self.cost.currency}")
        return f"Took: {', '.join(parts)}"

    def _add_group(self, group: Group) -> None:
        self.groups += 1
        self.latest_group = group
        self.rewards.add_group(group)
        if len(self.first_groups) < GROUPS_SHOWN:
            self.first_groups.append(group)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def line(self) -> str:
        """The state in a few words."""
        mean = mean_text(self.rewards.mean)
        rate = self.completion_tokens / max(self.seconds, 1e-9)
        parts = [f"reward {mean}", f"{rate:,.0f} tok/s"]
        parts += [f"{kind} {count}" for kind, count in self.failures.most_common(2)]
        parts += [f"{reason} {count}" for reason, count in self.drops.most_common(2)]
        return " · ".join(parts)


def mean_text(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.2f}"
