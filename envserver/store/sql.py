"""The store, and how it is opened.

    async with open_store("data/envserver.db") as store:
        await store.put([GroupPut(...)])
        lease = await store.lease("trainer", max_groups=16, seconds=600)
        bodies = await store.bodies([group.group_id for group in lease.groups])
        await store.ack(lease.lease_id)

What always holds: when a method that changes something returns, the change is on disk. When it
raises a UsageError (InputError, NotFoundError, ConflictError) or StoreFull, nothing changed. Any
method may raise StoreError: the change was made completely or not at all, and calling it again is
safe; after StoreLost the store cannot be used any more. All methods are called from one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from envserver_records.errors import InputError, StoreFull
from sqlalchemy.ext.asyncio import AsyncConnection

from . import deliveries, leases, retention
from . import groups as estimates
from .database import (
    Database,
    DatabaseUnreachable,
    ForwardClock,
    RetryGate,
    SteadyClock,
    is_unreachable,
    open_database,
    typed,
    typed_failures,
)
from .groups import EncodedPut, encode_puts
from .lookups import StoreLookups
from .rows import (
    UNKNOWN_VERSION,
    Compacted,
    Delivery,
    GroupPut,
    Lease,
    Run,
    RunState,
)
from .transaction import Memory, Transaction, load_memory
from .writer import StoreLock, Writer, acquire, read_lock, save_time

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

_DROPPED_AT_ONCE: Final = 1000
_INLINE_BYTES: Final = 32 * 1024
"""Less than this is compressed on the event loop, which is faster than switching threads."""


def _writes(
    operation: Callable[Concatenate[Transaction, P], Awaitable[T]],
    *,
    adds: bool = False,
    counted: str = "",
) -> Callable[Concatenate[Store, P], Coroutine[Any, Any, T]]:
    """Makes a method of an operation; the operation's docstring is the method's. `adds`: it is
    refused while the disk is full, as a put; `counted`: counts its successes in `statistics`."""

    @wraps(operation)
    async def method(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result = await self._writer.do(lambda tx: operation(tx, *args, **kwargs), adds=adds)
        if counted:
            self.statistics.leases[counted] += 1
        return result

    return method


class Store(StoreLookups):
    """An open store, made by `open_store`. Any number of tasks of one event loop may use it."""

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
        """Ends the pause until the next try."""
        self._retry.open()
        self._writer.retry.open()

    count_dropped = _writes(estimates.count_dropped, adds=True)
    drop_damaged = _writes(deliveries.drop_damaged)
    move = _writes(deliveries.move)
    ack = _writes(leases.ack, counted="acked")
    nack = _writes(leases.nack, counted="nacked")
    set_aside = _writes(leases.set_aside)
    extend = _writes(leases.extend)
    expire = _writes(leases.expire)
    rewind = _writes(leases.rewind)
    close_run = _writes(leases.close_run)
    put_minute = _writes(leases.put_minute)

    async def put(self, groups: Sequence[GroupPut]) -> list[bool]:
        """Stores all of these groups, or none. Returns for each whether it was stored; False if its
        id exists already (nothing changes). Raises StoreFull, and InputError: no id, or a state to
        which it cannot be put."""
        if not groups:
            return []
        is_small = sum(len(group.body) for group in groups) < _INLINE_BYTES
        encoded = encode_puts(groups) if is_small else await self._in_thread(encode_puts, groups)
        return await self._writer.put(encoded)

    async def put_encoded(self, groups: Sequence[EncodedPut]) -> list[bool]:
        """Like `put`, for groups whose bodies are already encoded."""
        return await self._writer.put(groups) if groups else []

    @property
    def discount(self) -> float:
        """Discount of task estimates per policy version; see `rollouts.estimates`."""
        return self._writer.discount

    @discount.setter
    def discount(self, discount: float) -> None:
        self._writer.discount = discount

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        stored = await self.stored_bodies(group_ids)
        return await self._in_thread(partial(deliveries.decode_all, group_ids), stored)

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
        """Leases the oldest queued groups to `run` for `seconds`, after expired leases were taken
        back; None if nothing, or too little, is queued.

        Args:
            max_groups, max_sequences, max_tokens: at least one group is leased even if it is
                larger.
            min_groups: lease nothing if fewer groups match.
            environments: only groups of these, as far as the run takes them; None: all.
            min_version: only groups of this policy version or a later one, or of an unknown one;
                never of one before `oldest_version`.
            group_ids: lease exactly these groups, in this order; no limit or filter may be given.
            lease_id: id of the new lease; if it is an open lease of this run, that lease is
                returned.

        Raises:
            ConflictError: the run is closed, a group is not queued or not of the run's
                environments, or `lease_id` belongs to another lease or to one that has ended.
        """
        leases.check_seconds(seconds)
        sizes = (max_groups, max_sequences, max_tokens, min_groups)
        names = ("max_groups", "max_sequences", "max_tokens", "min_groups")
        for place, limit in zip(names, sizes, strict=True):
            if limit is not None and limit < 1:
                raise InputError(f"{place} must be at least 1.", place=place)
        if group_ids is not None:
            others = (max_groups, max_sequences, max_tokens, environments, min_version)
            if min_groups != 1 or any(other is not None for other in others):
                raise InputError("Give group_ids, or limits and filters.", place="group_ids")
            wanted: deliveries.GroupSelection | list[str] = list(group_ids)
        else:
            oldest = self.oldest_version
            if oldest > UNKNOWN_VERSION:
                min_version = oldest if min_version is None else max(min_version, oldest)
            chosen = None if environments is None else frozenset(environments)
            wanted = deliveries.GroupSelection(chosen, min_version, *sizes)
        leased = partial(leases.lease, run=run, wanted=wanted, seconds=seconds, lease_id=lease_id)
        return self.statistics.leased(await self._writer.do(leased))

    async def drop_stale(self, below_version: int) -> int:
        """Drops queued groups of known policy versions below this one; returns how many deliveries.
        Leased groups stay."""
        dropped = 0
        while True:
            now = await self._writer.do(
                partial(deliveries.drop_stale, below_version=below_version, limit=_DROPPED_AT_ONCE)
            )
            dropped += now
            if now < _DROPPED_AT_ONCE:
                return dropped

    async def compact(self, *, acked_hours: float = 24.0, max_gb: float | None = None) -> Compacted:
        """Removes groups that every run acked, or that were dropped, at least `acked_hours` ago;
        see `retention`. `max_gb` (1e9 bytes; None: no limit): while all bodies have more, the
        oldest groups are removed earlier."""
        return await retention.compact(
            self._writer,
            self._reading,
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
        """Creates a run and opens it, or opens the run of this name if its arguments are the same;
        else ConflictError. A broadcast run gets all groups, from the oldest that is kept and was
        not dropped."""
        text = leases.to_json(settings or {}, "settings")
        run = await self._writer.do(
            partial(
                leases.create_run,
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
            run = await self._writer.do(partial(leases.open_some, name=name))
            if run.state == "open":
                return run

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
        """Changes what is not None; `state` acts like `close_run` and `create_run`."""
        given = {
            "batch_size": batch_size,
            "settings": None if settings is None else leases.to_json(settings, "settings"),
            "policy_version": policy_version,
            "environments": None if environments is None else leases.names_json(environments),
        }
        changes = {column: value for column, value in given.items() if value is not None}

        async def change(tx: Transaction) -> Run:
            run = await leases.set_run(tx, name, changes)
            return await leases.close_run(tx, name) if state == "closed" else run

        run = await self._writer.do(change)
        return await self._open_run(name) if state == "open" else run

    async def set_value(self, key: str, json_value: Any) -> None:
        await self.set_values({key: json_value})

    async def set_values(self, json_values: Mapping[str, Any]) -> None:
        """Sets several JSON-like values in one transaction; None removes a value."""
        texts = {
            key: None if value is None else leases.to_json(value, "value")
            for key, value in json_values.items()
        }
        await self._writer.do(partial(leases.set_values, texts=texts))

    async def touch(self) -> None:
        """Writes the store's time. Raises StoreError if the store cannot be written."""
        # As what adds: a check must not use up the reserve of a full disk.
        await self._writer.do(lambda tx: save_time(tx.connection, tx.now), adds=True)

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


_THREADS: Final = 2
"""Threads that compress and decompress bodies."""


@asynccontextmanager
async def open_store(
    where: str | Path,
    *,
    clock: Callable[[], float] | None = None,
    wait_seconds: float = 0.0,
    reserve_bytes: int = 0,
    shared: bool = False,
) -> AsyncIterator[Store]:
    """Opens the store at `where`, or creates it; only one process at a time can have it open.

    Args:
        where: a path (missing folders are made), `sqlite:///path` or `postgresql://user@host/name`.
        clock: returns seconds; leases expire by it. Default: a `SteadyClock`, which begins at
            PostgreSQL's time, or that of this machine.
        wait_seconds: how long to wait for a PostgreSQL that does not answer yet.
        reserve_bytes: for SQLite, disk space held back for leases and acks; see `reserve.py`.
        shared: other servers wait for the store: if one has it, refuse at once; see `leadership`.
    """
    async with open_database(where, wait_seconds, reserve_bytes, shared=shared) as database:
        # The file stays locked as long as this process lives. Nothing has to be written to hold the
        # lock, which would fail on a full disk.
        is_file = database.files is not None
        with typed_failures():
            if is_file:
                async with database.reader.begin() as connection:
                    lock, memory = await _known(read_lock, connection)
                await _check_writable(database, lock)
            else:
                lock, memory = await database.writer.transact(partial(_known, acquire))
            now = await database.now()
        time_now = ForwardClock(clock or SteadyClock(lambda: now), lock.last_time)
        writer = Writer(database, memory, time_now, lock.owner)
        with ThreadPoolExecutor(_THREADS, "store") as threads:
            async with _running(writer):
                yield Store(database, writer, threads, time_now)


async def _check_writable(database: Database, lock: StoreLock) -> None:
    """Raises StoreError if nothing can be written. A full disk is let pass: trainers drain it."""
    try:
        with typed_failures():
            await database.writer.transact(partial(save_time, now=lock.last_time))
    except StoreFull:
        if database.reserve is not None:
            database.reserve.full = True


async def _known(
    find: Callable[[AsyncConnection], Awaitable[StoreLock]], connection: AsyncConnection
) -> tuple[StoreLock, Memory]:
    return await find(connection), await load_memory(connection, trust_written=True)


@asynccontextmanager
async def _running(writer: Writer) -> AsyncIterator[None]:
    """Runs `writer` while the body runs; cancels the body when the store is lost."""
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
