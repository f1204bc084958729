"""Runs write transactions: on SQLite in one thread, otherwise on the event loop.

In: work, a coroutine function of a connection. Out: its result, once what it wrote is durable. The
work is the same for both: SQLAlchemy Core queries, awaited. An asynchronous SQLite driver changes
threads for every statement, which costs more than the statements; so on SQLite the work runs over a
blocking connection, and the whole transaction changes threads once.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Connection, CursorResult, Dialect, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

T = TypeVar("T")
Work = Callable[[AsyncConnection], Coroutine[Any, Any, T]]


class WriteConnection(Protocol):
    """The one connection that writes, one transaction at a time."""

    async def transact(self, work: Work[T]) -> T:
        """Runs `work` in a transaction; durable on return, rolled back if it raises.

        If cancelled, the transaction has ended, committed or not.
        """
        ...

    async def connect(self) -> None:
        """Connects unless connected."""
        ...

    async def dispose(self) -> None:
        """Closes the connection."""
        ...


class AsyncWriteConnection:
    """Writes with an asynchronous driver, on the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def transact(self, work: Work[T]) -> T:
        async with self._engine.begin() as connection:
            return await work(connection)

    async def connect(self) -> None:
        await (await self._engine.connect()).close()

    async def dispose(self) -> None:
        await self._engine.dispose()


class ThreadWriteConnection:
    """Writes with a blocking driver, in its own thread. Work may only await its connection.

    What holds: a connection is kept from one transaction to the next, and closed after one that
    failed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "store-writer")
        self._kept: Connection | None = None

    async def transact(self, work: Work[T]) -> T:
        return await self._in_thread(lambda: self._transact(work))

    async def connect(self) -> None:
        await self._in_thread(self._connected)

    async def dispose(self) -> None:
        await self._in_thread(self._dispose)
        self._thread.shutdown()

    def _connected(self) -> Connection:
        if self._kept is None:
            self._kept = self._engine.connect()
        return self._kept

    def _release(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _dispose(self) -> None:
        self._release()
        self._engine.dispose()

    def _transact(self, work: Work[T]) -> T:
        connection = self._connected()
        try:
            with connection.begin():
                return _run_without_loop(
                    work(cast(AsyncConnection, _BlockingConnection(connection)))
                )
        except BaseException:
            self._release()
            raise

    async def _in_thread(self, do: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._thread, do)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: wait until the connection is free.
            await asyncio.wait([running])
            running.exception()  # marks it as retrieved
            raise


class _BlockingConnection:
    """The part of AsyncConnection that work uses, over a blocking connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def dialect(self) -> Dialect:
        return self._connection.dialect

    async def execute(self, *what: Any) -> CursorResult[Any]:
        return self._connection.execute(*what)

    async def exec_driver_sql(
        self, text: str, values: tuple[Any, ...] | Sequence[tuple[Any, ...]]
    ) -> Iterable[Any]:
        """Runs a statement by the driver itself: SQLAlchemy would take longer than SQLite.

        Args:
            values: of its parameters; a list: runs it for each of them.
        """
        driver = cast(sqlite3.Connection, self._connection.connection.driver_connection)
        if isinstance(values, tuple):
            return driver.execute(text, values)
        return driver.executemany(text, values)

    async def scalar(self, *what: Any) -> Any:
        return self._connection.scalar(*what)

    async def scalars(self, *what: Any) -> Any:
        return self._connection.scalars(*what)

    async def run_sync(self, do: Callable[[Connection], T]) -> T:
        return do(self._connection)


def _run_without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns a coroutine's result without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    coroutine.close()
    raise RuntimeError("A write operation awaited something other than its connection.")
