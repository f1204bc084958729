"""The lookups of a store that are answered from memory, and waiting for changes. Cheap at any
depth.
"""

from __future__ import annotations

from collections.abc import Mapping

from .rows import UNKNOWN_VERSION
from .schema import SHARED
from .states import SETTLED, GroupState
from .statistics import StoreStatistics
from .transaction import KnownRun
from .writer import Writer


class MemoryLookups:
    """The read-only part of a store that is answered from memory."""

    _writer: Writer

    @property
    def statistics(self) -> StoreStatistics:
        """Counts of commits and leases since the store was opened."""
        return self._writer.statistics

    @property
    def waiting_operations(self) -> int:
        """Operations that wait for the next commit."""
        return self._writer.waiting

    @property
    def disk_problem(self) -> str:
        """Why new groups may be refused for lack of disk space; "" if there is space."""
        return self._writer.disk_problem

    @property
    def conflicting_puts(self) -> int:
        """Puts since opening whose id existed with another body (the first body stays)."""
        return self._writer.memory.conflicting_puts

    async def counts(self) -> dict[GroupState, int]:
        """Returns the number of groups in each state in the shared queue, including removed
        ones.
        """
        return self._writer.memory.counts(SHARED)

    @property
    def stored_bytes(self) -> int:
        """Size of the bodies of all groups that are kept, as stored."""
        return self._writer.memory.stored_bytes

    def most_waiting(self) -> int:
        """Returns the number of groups that wait, or are leased, in the longest queue from which a
        run draws.
        """
        memory = self._writer.memory
        waiting = dict.fromkeys(memory.drawn_from(), 0)
        for (queue, _, state), count in memory.tallies.items():
            if queue in waiting and state not in SETTLED:
                waiting[queue] += count
        return max(waiting.values(), default=0)

    async def depths(self) -> dict[str, int]:
        """Returns for each open run how many groups are queued or leased for it."""
        memory = self._writer.memory
        return {
            name: memory.waiting(run) for name, run in memory.runs.items() if run.state == "open"
        }

    async def counters(self) -> dict[str, int]:
        """Returns totals since the store was created: `expired` (leases), `nacked` and `nacked:
        REASON` (leases), `set_aside: REASON`, `rewound`, `stale_dropped` (deliveries), `removed`,
        `damaged` (groups);
        and `conflicting_puts` since it was opened. Zero counters are missing.
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
        """Waits until `changes` differs from `since` (default: its value now), at most `timeout`
        seconds.

        To miss nothing, read `changes` before looking at the store, and pass that value as `since`.
        Closing the store wakes everybody as well.

        Returns:
            `changes`.
        """
        self._writer.check_open()
        known = self._writer.changes.number if since is None else since
        return await self._writer.changes.wait(known, timeout)

    @property
    def last_seq(self) -> int:
        """`seq` of the group that arrived last, as of the last commit; numbers have no gaps."""
        return self._writer.memory.next_seq - 1

    @property
    def tallies(self) -> Mapping[tuple[str, str, GroupState], int]:
        """Number of deliveries by (queue, environment, state), as of the last commit."""
        return self._writer.memory.tallies

    def may_hold_older(self, version: int) -> bool:
        """Returns whether groups older than this policy version may be queued."""
        known = self._writer.memory.versions
        return any(UNKNOWN_VERSION < one < version for one in known)

    @property
    def open_runs(self) -> Mapping[str, KnownRun]:
        """The open runs by name, as of the last commit."""
        known = self._writer.memory.runs
        return {name: run for name, run in known.items() if run.state == "open"}

    def hungry_for(self, run: str) -> int:
        """Returns the `min_groups` of the run's latest lease if too little was queued, otherwise
        0.
        """
        return self._writer.memory.hungry.get(run, 0)

    @property
    def activity(self) -> int:
        """A number that grows with every change of a delivery or a run."""
        return self._writer.activity.number

    async def wait_for_activity(self, timeout: float | None, *, since: int) -> int:
        """Like `wait_for_change`, for `activity`."""
        self._writer.check_open()
        return await self._writer.activity.wait(since, timeout)
