"""The SQL implementation of a store (`interface.GroupStore`), and how it is opened.

    async with open_store("data/envserver.db") as store:
        await store.put([GroupPut(...)])
        lease = await store.lease("trainer", max_groups=16, seconds=600)
        bodies = await store.bodies([group.group_id for group in lease.groups])
        await store.ack(lease.lease_id)

What always holds: when a method that changes something returns, the change is on disk. When it
raises a UsageError or StoreFull, nothing changed. Any method may raise StoreError: the change was
made completely or not at all, and calling it again is safe. The store works on after either, but
not after StoreLost. The README says what it does in each kind of failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from envserver_records.errors import InputError
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import Scored
from . import damage, deliveries, leases, retention, runs
from . import groups as estimates
from .database import Database, DatabaseUnreachable, RetryGate
from .failures import is_unreachable, typed, typed_failures
from .groups import EncodedPut, encode_puts
from .lock import save_time
from .lookups import DatabaseLookups
from .rows import UNKNOWN_VERSION, Compacted, Delivery, GroupPut, Lease, Run
from .runs import put_minute
from .schema import SHARED
from .states import SETTLED, GroupState, RunState
from .statistics import StoreStatistics
from .transaction import KnownRun, Transaction
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


A = TypeVar("A")
T = TypeVar("T")

_DROPPED_AT_ONCE: Final = 1000
_INLINE_BYTES: Final = 32 * 1024
"""Less than this is compressed on the event loop, which is faster than switching threads."""


class Store(DatabaseLookups, MemoryLookups):
    """A `GroupStore`, made by `open_store`. Any number of tasks of one event loop may use it."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        threads: ThreadPoolExecutor,
        clock: Callable[[], float],
    ) -> None:
        self.name, self.database = database.name, database
        self.owner = writer.owner
        """Id of the process that has the store; None for SQLite."""
        self._reader = database.reader
        self._retry = RetryGate()
        self._writer = writer
        self._threads = threads
        self._clock = clock
        self.oldest_version = UNKNOWN_VERSION
        """Groups of an older policy version are leased only by id; -1: no limit."""

    def try_again(self) -> None:
        """Ends the pause until the next try: the database answers again."""
        self._retry.open()
        self._writer.retry.open()

    async def put(self, groups: Sequence[GroupPut]) -> list[bool]:
        if not groups:
            return []
        is_small = sum(len(group.body) for group in groups) < _INLINE_BYTES
        encoded = encode_puts(groups) if is_small else await self._in_thread(encode_puts, groups)
        return await self._writer.put(encoded)

    async def put_encoded(self, groups: Sequence[EncodedPut]) -> list[bool]:
        return await self._writer.put(groups) if groups else []

    async def count_dropped(self, news: Sequence[Scored]) -> int:
        work = partial(estimates.count_dropped, news=list(news))
        return await self._writer.do(work, adds=True)

    @property
    def discount(self) -> float:
        """Discount of task estimates per policy version; see `rollouts.estimates`."""
        return self._writer.discount

    @discount.setter
    def discount(self, discount: float) -> None:
        self._writer.discount = discount

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        stored = await self.stored_bodies(group_ids)
        return await self._in_thread(partial(damage.decode_all, group_ids), stored)

    async def drop_damaged(
        self, reasons: Mapping[str, str], *, undo: str | None = None
    ) -> list[str]:
        work = partial(damage.drop_damaged, reasons=dict(reasons), undo=undo)
        return await self._writer.do(work)

    async def move(self, group_ids: Sequence[str], to: GroupState) -> None:
        await self._writer.do(partial(deliveries.move, group_ids=list(group_ids), target=to))

    async def lease(
        self,
        run: str,
        *,
        max_groups: int | None = None,
        max_sequences: int | None = None,
        max_tokens: int | None = None,
        min_groups: int = 1,
        environments: Collection[str] | None = None,
        min_version: int | None = None,
        group_ids: Sequence[str] | None = None,
        seconds: float,
        lease_id: str | None = None,
    ) -> Lease | None:
        leases.check_seconds(seconds)
        limits = {
            "max_groups": max_groups,
            "max_sequences": max_sequences,
            "max_tokens": max_tokens,
            "min_groups": min_groups,
        }
        for place, limit in limits.items():
            if limit is not None and limit < 1:
                raise InputError(f"{place} must be at least 1.", place=place)
        if group_ids is not None:
            others = (max_groups, max_sequences, max_tokens, environments, min_version)
            if min_groups != 1 or any(other is not None for other in others):
                raise InputError("Give group_ids, or limits and filters.", place="group_ids")
            wanted: deliveries.GroupSelection | list[str] = list(group_ids)
        else:
            names = None if environments is None else frozenset(environments)
            oldest = self.oldest_version
            if oldest > UNKNOWN_VERSION:
                min_version = oldest if min_version is None else max(min_version, oldest)
            wanted = deliveries.GroupSelection(
                names, min_version, max_groups, max_sequences, max_tokens, min_groups
            )
        leased = partial(leases.lease, run=run, wanted=wanted, seconds=seconds, lease_id=lease_id)
        return self.statistics.leased(await self._writer.do(leased))

    async def ack(self, lease_id: str, *, checkpoint: str | None = None) -> None:
        await self._writer.do(partial(leases.ack, lease_id=lease_id, checkpoint=checkpoint))
        self.statistics.leases["acked"] += 1

    async def nack(self, lease_id: str, *, reason: str = "") -> None:
        await self._writer.do(partial(leases.nack, lease_id=lease_id, reason=reason))
        self.statistics.leases["nacked"] += 1

    async def set_aside(self, lease_id: str, group_ids: Sequence[str], *, reason: str) -> None:
        ids = list(group_ids)
        await self._writer.do(
            partial(leases.set_aside, lease_id=lease_id, group_ids=ids, reason=reason)
        )

    async def extend(self, lease_id: str, seconds: float) -> float:
        leases.check_seconds(seconds)
        return await self._writer.do(partial(leases.extend, lease_id=lease_id, seconds=seconds))

    async def expire(self, now: float | None = None) -> list[str]:
        at = self._clock() if now is None else now
        return await self._writer.do(partial(leases.expire, now=at))

    async def rewind(self, run: str, checkpoint: str | None) -> list[str]:
        return await self._writer.do(partial(leases.rewind, name=run, checkpoint=checkpoint))

    async def drop_stale(self, below_version: int) -> int:
        dropped = 0
        while True:
            now = await self._writer.do(
                partial(deliveries.drop_stale, below_version=below_version, limit=_DROPPED_AT_ONCE)
            )
            dropped += now
            if now < _DROPPED_AT_ONCE:
                return dropped

    async def compact(self, *, acked_hours: float = 24.0, max_gb: float | None = None) -> Compacted:
        access = retention.Access(self._reading, self._writer.do, lambda: self._writer.memory)
        return await retention.compact(
            access,
            now=self._clock(),
            acked_hours=acked_hours,
            max_bytes=None if max_gb is None else int(max_gb * 1e9),
        )

    async def create_run(
        self,
        name: str,
        *,
        batch_size: int,
        settings: dict[str, Any] | None = None,
        delivery: Delivery = "shared",
        environments: Collection[str] = (),
    ) -> Run:
        text = runs.to_json(settings or {}, "settings")
        run = await self._writer.do(
            partial(
                runs.create_run,
                name=name,
                batch_size=batch_size,
                settings=text,
                delivery=delivery,
                environments=list(environments),
            )
        )
        return run if run.state == "open" else await self._open_run(name)

    async def _open_run(self, name: str) -> Run:
        """Opens a run; fills the queue of a broadcast run in small transactions."""
        while True:
            run = await self._writer.do(partial(runs.open_some, name=name))
            if run.state == "open":
                return run

    async def close_run(self, name: str) -> Run:
        return await self._writer.do(partial(leases.close_run, name=name))

    async def set_run(
        self,
        name: str,
        *,
        batch_size: int | None = None,
        settings: dict[str, Any] | None = None,
        policy_version: int | None = None,
        environments: Collection[str] | None = None,
        state: RunState | None = None,
    ) -> Run:
        given = {
            "batch_size": batch_size,
            "settings": None if settings is None else runs.to_json(settings, "settings"),
            "policy_version": policy_version,
            "environments": None if environments is None else runs.names_json(environments),
        }
        changes = {column: value for column, value in given.items() if value is not None}

        async def change(tx: Transaction) -> Run:
            run = await runs.set_run(tx, name, changes)
            return await leases.close_run(tx, name) if state == "closed" else run

        run = await self._writer.do(change)
        return await self._open_run(name) if state == "open" else run

    async def set_value(self, key: str, json_value: Any) -> None:
        await self.set_values({key: json_value})

    async def set_values(self, json_values: Mapping[str, Any]) -> None:
        texts = {
            key: None if value is None else runs.to_json(value, "value")
            for key, value in json_values.items()
        }
        await self._writer.do(partial(runs.set_values, texts=texts))

    async def touch(self) -> None:
        """Writes the store's time. Raises StoreError if the store cannot be written."""
        # As what adds: a check must not use up the reserve of a full disk.
        await self._writer.do(lambda tx: save_time(tx.connection, tx.now), adds=True)

    async def put_minute(self, minute: int, numbers: str, keep_from: int) -> None:
        put = partial(put_minute, minute=minute, numbers=numbers, keep_from=keep_from)
        await self._writer.do(put)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        self._writer.check_open()
        self._retry.check()
        with typed_failures():
            try:
                async with self._reader.connect() as connection:
                    yield connection
            except Exception as error:
                if is_unreachable(error):
                    self._retry.failed(DatabaseUnreachable(str(typed(error))))
                raise
        self._retry.worked()

    async def _in_thread(self, function: Callable[[A], T], argument: A) -> T:
        self._writer.check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, argument)
