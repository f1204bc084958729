"""What the store tells from memory, and waiting until it changes: costs nothing at any depth."""

from __future__ import annotations

from collections.abc import Mapping

from .rows import UNKNOWN_VERSION
from .schema import SHARED
from .states import GroupState
from .statistics import StoreStatistics
from .transaction import KnownRun
from .writer import Writer


class MemoryLookups:
    """The part of a store that is asked often."""

    _writer: Writer

    @property
    def statistics(self) -> StoreStatistics:
        """What it counts of itself."""
        return self._writer.statistics

    @property
    def waiting_operations(self) -> int:
        """Operations that no commit has taken up yet."""
        return self._writer.waiting

    @property
    def conflicting_puts(self) -> int:
        """Puts since opening of an id that was there with another body (the first one stays)."""
        return self._writer.memory.conflicting_puts

    async def counts(self) -> dict[GroupState, int]:
        """Groups in each state in the shared queue, with those that are no longer kept.

        Kept in memory: costs nothing at any depth.
        """
        return self._writer.memory.counts(SHARED)

    async def depths(self) -> dict[str, int]:
        """For each open run, how many groups of its environments are queued or leased in its queue.

        Kept in memory: costs nothing at any depth.
        """
        memory = self._writer.memory
        return {
            name: memory.waiting(run) for name, run in memory.runs.items() if run.state == "open"
        }

    async def counters(self) -> dict[str, int]:
        """Totals since the store was made: `expired` (leases), `nacked` and `nacked: REASON`
        (leases), `rewound`, `stale_dropped` (deliveries), `removed`, `damaged` (groups); and
        `conflicting_puts` since it was opened. What never happened is missing.
        """
        return {**self._writer.memory.counters, "conflicting_puts": self.conflicting_puts}

    @property
    def changes(self) -> int:
        """A number that grows whenever a group is queued (put, moved, given back, expired, rewound)
        or a run is closed.
        """
        return self._writer.changes.number

    async def wait_for_change(
        self, timeout: float | None = None, *, since: int | None = None
    ) -> int:
        """Waits until `changes` is not `since` (unset: what it is now), at most `timeout` seconds.

        Whoever looked before it waits should give the `changes` of before it looked: what happened
        in between is not missed then. The store's end wakes everybody, too.

        Returns:
            `changes`.
        """
        self._writer.check_open()
        known = self._writer.changes.number if since is None else since
        return await self._writer.changes.wait(known, timeout)

    @property
    def tallies(self) -> Mapping[tuple[str, str, GroupState], int]:
        """Deliveries by queue, environment and state, as of the last commit."""
        return self._writer.memory.tallies

    def may_hold_older(self, version: int) -> bool:
        """Whether a group may be queued that is of a policy version before this one."""
        known = self._writer.memory.versions
        return any(UNKNOWN_VERSION < one < version for one in known)

    @property
    def open_runs(self) -> Mapping[str, KnownRun]:
        """The open runs by name, as of the last commit."""
        known = self._writer.memory.runs
        return {name: run for name, run in known.items() if run.state == "open"}

    def hungry_for(self, run: str) -> int:
        """The least groups that the latest lease of a run asked for and did not find; else 0."""
        return self._writer.memory.hungry.get(run, 0)

    @property
    def activity(self) -> int:
        """A number that grows with every change of a delivery or a run."""
        return self._writer.activity.number

    async def wait_for_activity(self, timeout: float | None, *, since: int) -> int:
        """As `wait_for_change`, for `activity`."""
        self._writer.check_open()
        return await self._writer.activity.wait(since, timeout)
