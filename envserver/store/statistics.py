"""Statistics of an open store since it was opened, and the signal that something has changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..telemetry.numbers import SHORT_SECONDS, Distribution
from .facts import GroupFacts
from .rows import Lease

_SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


_MOST_ENVIRONMENTS: Final = 200
_OTHER: Final = "other"


class Arrived:
    """The groups of one environment, local and remote. `rewards` has no bounds: sum and count."""

    def __init__(self) -> None:
        self.groups = self.equal = self.tokens = 0
        self.rewards = Distribution(())

    def add(self, facts: GroupFacts | None) -> None:
        """Counts a group."""
        self.groups += 1
        if facts is None or facts.reward_mean is None:
            return
        self.equal += facts.rated > 1 and facts.reward_min == facts.reward_max
        self.tokens += facts.completion_tokens or 0
        self.rewards.counts[0] += facts.rated
        self.rewards.total += facts.reward_mean * facts.rated


class StoreStatistics:
    """Counts commits, leases and groups.

    Args:
        commit_seconds: seconds of each transaction, from its first statement until it is durable.
        commit_sizes: operations in each commit.
        leases: number of leases that were leased, acked, nacked.
        arrived: groups that were stored, by environment.
        on_lease: called with each lease that is handed out.
    """

    def __init__(self) -> None:
        self.commit_seconds = Distribution(SHORT_SECONDS)
        self.commit_sizes = Distribution(_SIZES)
        self.leases: Counter[str] = Counter()
        self.arrived: dict[str, Arrived] = {}
        self.on_lease: Callable[[Lease], None] | None = None

    def committed(self, operations: int, seconds: float) -> None:
        """Counts one commit."""
        self.commit_seconds.add(seconds)
        self.commit_sizes.add(operations)

    def stored(self, environment: str, facts: GroupFacts | None) -> None:
        """Counts a group that is new to the store."""
        if environment not in self.arrived and len(self.arrived) >= _MOST_ENVIRONMENTS:
            environment = _OTHER
        self.arrived.setdefault(environment, Arrived()).add(facts)

    def leased(self, lease: Lease | None) -> Lease | None:
        """Counts `lease` unless it is None, and returns it."""
        if lease is not None:
            self.leases["leased"] += 1
            if self.on_lease is not None:
                self.on_lease(lease)
        return lease


class Changes:
    """A number that grows, and any number of coroutines that wait for it to change."""

    def __init__(self) -> None:
        self.number = 0
        self._grown = asyncio.Event()

    def announce(self, number: int) -> None:
        """Sets the number and wakes all waiting coroutines, if it is a new one."""
        if number == self.number:
            return
        self.number = number
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def wait(self, since: int, timeout: float | None) -> int:
        """Returns the number as soon as it differs from `since`, or after `timeout` seconds."""
        if self.number == since:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._grown.wait()
        return self.number
