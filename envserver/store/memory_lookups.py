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
    """The part of `interface.LookUp` that is answered from memory."""

    _writer: Writer

    @property
    def statistics(self) -> StoreStatistics:
        return self._writer.statistics

    @property
    def waiting_operations(self) -> int:
        return self._writer.waiting

    @property
    def disk_problem(self) -> str:
        return self._writer.disk_problem

    async def counts(self) -> dict[GroupState, int]:
        return self._writer.memory.counts(SHARED)

    @property
    def stored_bytes(self) -> int:
        return self._writer.memory.stored_bytes

    def most_waiting(self) -> int:
        memory = self._writer.memory
        waiting = dict.fromkeys(memory.drawn_from(), 0)
        for (queue, _, state), count in memory.tallies.items():
            if queue in waiting and state not in SETTLED:
                waiting[queue] += count
        return max(waiting.values(), default=0)

    async def depths(self) -> dict[str, int]:
        memory = self._writer.memory
        return {
            name: memory.waiting(run) for name, run in memory.runs.items() if run.state == "open"
        }

    async def counters(self) -> dict[str, int]:
        memory = self._writer.memory
        return {**memory.counters, "conflicting_puts": memory.conflicting_puts}

    @property
    def changes(self) -> int:
        return self._writer.changes.number

    async def wait_for_change(
        self, timeout: float | None = None, *, since: int | None = None
    ) -> int:
        self._writer.check_open()
        known = self._writer.changes.number if since is None else since
        return await self._writer.changes.wait(known, timeout)

    @property
    def last_seq(self) -> int:
        return self._writer.memory.next_seq - 1

    @property
    def tallies(self) -> Mapping[tuple[str, str, GroupState], int]:
        return self._writer.memory.tallies

    def may_hold_older(self, version: int) -> bool:
        known = self._writer.memory.versions
        return any(UNKNOWN_VERSION < one < version for one in known)

    @property
    def open_runs(self) -> Mapping[str, KnownRun]:
        known = self._writer.memory.runs
        return {name: run for name, run in known.items() if run.state == "open"}

    def hungry_for(self, run: str) -> int:
        return self._writer.memory.hungry.get(run, 0)

    @property
    def activity(self) -> int:
        return self._writer.activity.number

    async def wait_for_activity(self, timeout: float | None, *, since: int) -> int:
        self._writer.check_open()
        return await self._writer.activity.wait(since, timeout)
