"""The store: groups in, leases out, and nothing that was accepted is lost.

    async with open_store("data/envserver.db") as store:
        await store.put([GroupPut(...)])
        lease = await store.lease("trainer", max_groups=16, seconds=600)
        bodies = await store.bodies([group.group_id for group in lease.groups])
        await store.ack(lease.lease_id)

What holds: when a method that changes something returns, the change is on disk; when it raises a
UsageError or StoreFull, nothing changed. Any method may raise StoreError: the change was made as a
whole or not at all, and asking again is safe. The store goes on working after either, but not after
StoreLost. The README here has what it does when something fails.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from envserver_records.errors import InputError
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import Scored
from . import closing, damage, deliveries, estimates, groups, leases, retention, runs
from .clock import ForwardClock, SteadyClock
from .database import Database, open_database
from .failures import is_unreachable, typed, typed_failures
from .groups import EncodedPut, encode_puts
from .lock import StoreLock, acquire, read_lock
from .lookups import DatabaseLookups
from .memory_lookups import MemoryLookups
from .retry import DatabaseUnreachable, RetryGate
from .rows import (
    UNKNOWN_VERSION,
    Compacted,
    Delivery,
    GroupPut,
    Lease,
    Run,
)
from .states import GroupState, RunState
from .transaction import Memory, Transaction, load_memory
from .writer import Writer

A = TypeVar("A")
T = TypeVar("T")

_THREADS: Final = 2
"""For compressing and inflating bodies."""
_DROPPED_AT_ONCE: Final = 1000
_INLINE_BYTES: Final = 32 * 1024
"""Less than this is compressed on the event loop: it takes less time than a change of threads."""


@asynccontextmanager
async def open_store(
    where: str | Path, *, clock: Callable[[], float] | None = None
) -> AsyncIterator[Store]:
    """Opens, and creates where missing, the store at `where`; at most one process has it open.

    Args:
        where: a path (its folder is made), `sqlite:///path` or `postgresql://user@host/name`.
        clock: seconds; leases expire by it. Unset: a `SteadyClock`, which the wall's does not move.

    Raises:
        ConfigError: no such kind of store, not one of ours, or one of a newer version.
        ConflictError: another process has it open.
        StoreError: it cannot be reached.
        StoreLost: later, after the body was cancelled: another process has opened the store while
            its database was out of reach, or its file was removed or replaced.
    """
    async with open_database(where) as database:
        # A file stays locked as long as this process lives: nothing has to be written to hold it,
        # which a full disk would refuse.
        is_file = database.files is not None
        with typed_failures():
            if is_file:
                async with database.reader.begin() as connection:
                    lock, memory = await _known(read_lock, connection)
            else:
                lock, memory = await database.writer.transact(partial(_known, acquire))
        time_now = ForwardClock(clock or SteadyClock(), lock.last_time)
        writer = Writer(database, memory, time_now, lock.owner)
        with ThreadPoolExecutor(_THREADS, "store") as threads:
            async with _running(writer):
                yield Store(database, writer, threads, time_now)


async def _known(
    find: Callable[[AsyncConnection], Awaitable[StoreLock]], connection: AsyncConnection
) -> tuple[StoreLock, Memory]:
    return await find(connection), await load_memory(connection, trust_written=True)


@asynccontextmanager
async def _running(writer: Writer) -> AsyncIterator[None]:
    """Runs `writer` for as long as the body runs; a store that is lost cancels the body."""
    body = asyncio.current_task()
    assert body is not None
    stop = False

    def cancel_body(task: asyncio.Task[None]) -> None:
        nonlocal stop
        stop = True
        body.cancel()

    task = asyncio.create_task(writer.run(), name="store-writer")
    task.add_done_callback(cancel_body)
    try:
        yield
    finally:
        task.remove_done_callback(cancel_body)
        if stop:
            body.uncancel()
        writer.close()
        await task


class Store(DatabaseLookups, MemoryLookups):
    """An open store, made by `open_store`, for any number of concurrent callers of one loop."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        threads: ThreadPoolExecutor,
        clock: Callable[[], float],
    ) -> None:
        self.name = database.name
        self._reader = database.reader
        self._retry = RetryGate()
        self._writer = writer
        self._threads = threads
        self._clock = clock
        self.oldest_version = UNKNOWN_VERSION
        """Groups of an older policy version are not leased, unless by their ids; -1: all are."""

    async def put(self, groups: Sequence[GroupPut]) -> list[bool]:
        """Stores groups, all or none; durable on return.

        Returns:
            For each: True when stored, False when its id was already there (nothing changed).

        Raises:
            InputError: a field cannot be stored.
        """
        if not groups:
            return []
        is_small = sum(len(group.body) for group in groups) < _INLINE_BYTES
        encoded = encode_puts(groups) if is_small else await self._in_thread(encode_puts, groups)
        return await self._writer.put(encoded)

    async def put_encoded(self, groups: Sequence[EncodedPut]) -> list[bool]:
        """As `put`, for groups whose bodies are already as they are to lie in the database."""
        return await self._writer.put(groups) if groups else []

    async def count_dropped(self, news: Sequence[Scored]) -> int:
        """Counts groups that were scored and are not stored, each id once; how many were new.
        What is put counts by itself.
        """
        return await self._writer.do(partial(estimates.count_dropped, news=list(news)))

    @property
    def discount(self) -> float:
        """Of the estimates for each policy version, see `rollouts.estimates`; may be set."""
        return self._writer.discount

    @discount.setter
    def discount(self, discount: float) -> None:
        self._writer.discount = discount

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        """The bodies of these groups, in this order.

        Raises:
            NotFoundError: one does not exist.
            DamagedBodies: some cannot be read; see `drop_damaged`.
        """
        async with self._reading() as connection:
            stored = await groups.stored_bodies(connection, group_ids)
        return await self._in_thread(partial(damage.decode_all, group_ids), stored)

    async def drop_damaged(
        self, reasons: Mapping[str, str], *, undo: str | None = None
    ) -> list[str]:
        """Drops groups that cannot be read from every queue where they wait or are leased, so that
        they are offered no more; each is counted once and its reason kept.

        Args:
            reasons: why, by group id.
            undo: an open lease that nobody has seen yet: what is left of it is queued again, and
                its id is free.

        Returns:
            The ids of those of which it was not known.
        """
        work = partial(damage.drop_damaged, reasons=dict(reasons), undo=undo)
        return await self._writer.do(work)

    async def move(self, group_ids: Sequence[str], to: GroupState) -> None:
        """Takes groups that wait in the shared queue from buffered to queued (then broadcast runs
        get them, too), or from either to dropped; all or none.

        Raises:
            NotFoundError: one does not exist.
            ConflictError: one is in a state that forbids it.
        """
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
        """Hands the oldest queued groups to `run` for `seconds`; overdue ones count as queued.

        Args:
            max_groups, max_sequences, max_tokens: stops before one is passed, but gives at least
                one group; unset: all.
            min_groups: nothing when fewer pass the filters.
            environments: only groups of these, and only of the run's own; unset: of all of those.
            min_version: only groups of this policy version or a later one, or of an unknown one;
                never of one before `oldest_version`.
            group_ids: exactly these, in this order, instead of all of the above.
            lease_id: that the lease is to have; the run's open lease that has it is given again.

        Returns:
            None when nothing, or too little, is queued.

        Raises:
            NotFoundError: no such run or group.
            ConflictError: the run is closed, one of `group_ids` is not queued or not of its
                environments, or `lease_id` is that of another lease, or of one that is over.
        """
        _check_seconds(seconds)
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
        """The lease's groups are done with. Twice is fine; late is, until taken over.

        Args:
            checkpoint: this and every earlier ack of the run belong to the checkpoint of this
                name, to which the run can `rewind`. A name that is used again moves on.

        Raises:
            NotFoundError: no such lease.
            ConflictError: it was given back, its run was closed or rewound since, or it expired
                and others have taken its groups.
        """
        await self._writer.do(partial(leases.ack, lease_id=lease_id, checkpoint=checkpoint))
        self.statistics.leases["acked"] += 1

    async def nack(self, lease_id: str, *, reason: str = "") -> None:
        """Gives the lease's groups back to the queue, where they keep their places. Twice is fine.

        Args:
            reason: under which it is counted.

        Raises:
            NotFoundError: no such lease.
            ConflictError: as for `ack`.
        """
        await self._writer.do(partial(leases.nack, lease_id=lease_id, reason=reason))
        self.statistics.leases["nacked"] += 1

    async def extend(self, lease_id: str, seconds: float) -> float:
        """Lets the lease end `seconds` from now; when that is.

        Raises:
            NotFoundError: no such lease.
            ConflictError: as for `ack`, or it was acked.
        """
        _check_seconds(seconds)
        return await self._writer.do(partial(leases.extend, lease_id=lease_id, seconds=seconds))

    async def expire(self, now: float | None = None) -> list[str]:
        """Queues again what leases hold that are due at `now` (unset: now); the leases' ids."""
        at = self._clock() if now is None else now
        return await self._writer.do(partial(leases.expire, now=at))

    async def rewind(self, run: str, checkpoint: str | None) -> list[str]:
        """Takes a run back to a checkpoint: what it acked after that is queued again.

        Its open leases are given back, and no late word about any lease of before counts.

        Args:
            checkpoint: one of `checkpoints`; None: to the beginning, as far as groups are kept.

        Returns:
            The ids of the groups whose acks are undone, oldest first.

        Raises:
            NotFoundError: no such run or checkpoint.
            ConflictError: retention removed groups that were acked after it; nothing changed.
        """
        return await self._writer.do(partial(closing.rewind, name=run, checkpoint=checkpoint))

    async def drop_stale(self, below_version: int) -> int:
        """Drops what is queued of policies before this version; how many deliveries.

        Groups of an unknown version stay, and so does what is leased.
        """
        dropped = 0
        while True:
            now = await self._writer.do(
                partial(deliveries.drop_stale, below_version=below_version, limit=_DROPPED_AT_ONCE)
            )
            dropped += now
            if now < _DROPPED_AT_ONCE:
                return dropped

    async def compact(self, *, acked_hours: float = 24.0, max_gb: float | None = None) -> Compacted:
        """Removes groups that were delivered (or dropped) in every queue long enough ago.

        Of such a group only the id stays, so that it is never stored again; counts go on counting
        it. What a run acked since its last but one checkpoint is always kept.

        Args:
            acked_hours: how long ago.
            max_gb: while the bodies of all groups take more than so many GB (1e9 bytes), the oldest
                go earlier; unset: no limit.
        """
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
        """A new open run; asking again with the same arguments gives the same run, open again.

        Args:
            delivery: shared: each group goes to one of the shared runs; broadcast: this run gets
                all groups, from the oldest that is kept and was not dropped.
            environments: only groups of these; empty: of all.

        Raises:
            ConflictError: there is one of this name with other arguments.
        """
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
        """Opens a run; what a broadcast one lacks is put into its queue in small transactions."""
        while True:
            run = await self._writer.do(partial(runs.open_some, name=name))
            if run.state == "open":
                return run

    async def close_run(self, name: str) -> Run:
        """The run leases no more, and what it holds is queued again. `create_run` opens it again;
        a broadcast run then also gets what came meanwhile and is still kept.

        Raises:
            NotFoundError: there is none.
        """
        return await self._writer.do(partial(closing.close_run, name=name))

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
        """Changes what is given; the state as `close_run` and `create_run` do.

        Raises:
            NotFoundError: there is none.
        """
        given = {
            "batch_size": batch_size,
            "settings": None if settings is None else runs.to_json(settings, "settings"),
            "policy_version": policy_version,
            "environments": None if environments is None else runs.names_json(environments),
        }
        changes = {column: value for column, value in given.items() if value is not None}

        async def change(tx: Transaction) -> Run:
            run = await runs.set_run(tx, name, changes)
            return await closing.close_run(tx, name) if state == "closed" else run

        run = await self._writer.do(change)
        return await self._open_run(name) if state == "open" else run

    async def set_value(self, key: str, json_value: Any) -> None:
        """Raises InputError: it is not JSON-like."""
        text = runs.to_json(json_value, "value")
        await self._writer.do(partial(runs.set_value, key=key, value=text))

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


def _check_seconds(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError("seconds must be a number above 0.", place="seconds")
