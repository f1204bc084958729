"""Opens a store: takes its lock, reads what the memory holds, and runs the writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from envserver_records.errors import StoreFull
from sqlalchemy.ext.asyncio import AsyncConnection

from .database import Database, ForwardClock, SteadyClock, open_database
from .failures import typed_failures
from .lock import StoreLock, acquire, read_lock, save_time
from .sql import Store
from .transaction import Memory, load_memory
from .writer import Writer

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
        clock: returns seconds; leases expire by it. Default: a `SteadyClock`, which does not follow
            changes of the system clock; it begins at PostgreSQL's time, or that of this machine.
        wait_seconds: for PostgreSQL, how long to wait for one that does not answer yet.
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
