"""Reads the groups of a store while another process may have it open; locks and changes nothing."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from envserver_records.errors import ConfigError, InputError, NotFoundError
from envserver_records.extras import install_command
from sqlalchemy import URL, NullPool, event, inspect, make_url, select
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from ..store.compression import DamagedBody, decode
from ..store.failures import typed_failures
from ..store.groups import arrived_after, stored_bodies
from ..store.rows import GroupRow
from ..store.schema import SCHEMA_VERSION, schema_version
from .stored_bodies import line_of
from .stored_raw import RawGroup

_PAGE: Final = 64
_NOT_DELIVERED: Final = ("buffered", "dropped")


def of_database(where: str) -> Iterator[RawGroup]:
    """Yields the groups that the store at `where` (path or URL) still keeps, oldest first.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it is not a store, or one of another version.
        StoreError: it does not answer.
    """
    url = _locate(where)
    name = url.database if url.get_backend_name() == "sqlite" else url.render_as_string()
    reading = _reading(url, str(name))
    # In a separate thread: the caller may be in an event loop.
    with ThreadPoolExecutor(1) as thread:
        loop = asyncio.new_event_loop()

        def step() -> tuple[GroupRow, Any] | None:
            return loop.run_until_complete(anext(reading, None))

        try:
            while (found := thread.submit(step).result()) is not None:
                yield _raw(*found, str(name))
        finally:
            thread.submit(loop.run_until_complete, reading.aclose()).result()
            thread.submit(loop.close).result()


def _raw(row: GroupRow, body: bytes | Exception, name: str) -> RawGroup:
    place = f"group {row.group_id} of {name}"

    def decoded() -> Any:
        if isinstance(body, Exception):
            raise InputError(f"{place} is damaged: {body}.", place=place) from body
        return line_of(body, row.format, row.env, row.group_id, place)

    return RawGroup(place, decoded)


async def _reading(url: URL, name: str) -> AsyncGenerator[tuple[GroupRow, bytes | Exception], None]:
    async with _connected(url) as connection:
        await _check_version(connection, name)
        after = 0
        while rows := await arrived_after(connection, after, _PAGE):
            for row in rows:
                if row.state not in _NOT_DELIVERED and (found := await _body(connection, row)):
                    yield row, found[0]
            after = rows[-1].seq


async def _body(connection: AsyncConnection, row: GroupRow) -> list[bytes | Exception]:
    """Returns the body; none where it was removed meanwhile."""
    try:
        ((encoding, stored),) = await stored_bodies(connection, [row.group_id])
    except NotFoundError:
        return []
    try:
        return [decode(encoding, stored)]
    except DamagedBody as error:
        return [error]


@asynccontextmanager
async def _connected(url: URL) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(
        url, poolclass=NullPool, isolation_level="AUTOCOMMIT", hide_parameters=True
    )
    if url.get_backend_name() == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def only_read(connection: Any, record: object) -> None:
            cursor = connection.cursor()
            cursor.execute("PRAGMA busy_timeout=10000")
            cursor.execute("PRAGMA query_only=ON")
            cursor.close()

    try:
        with typed_failures():
            async with engine.connect() as connection:
                yield connection
    finally:
        await engine.dispose()


async def _check_version(connection: AsyncConnection, name: str) -> None:
    names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    if schema_version.name not in names:
        raise ConfigError(f"{name} is not a store of envserver.")
    version = await connection.scalar(select(schema_version.c.version))
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"The store {name} has tables of version {version}; this envserver reads "
            f"{SCHEMA_VERSION}.",
            hint="`envserver serve` brings an older one up to date; for a newer one, upgrade.",
        )


def _locate(where: str) -> URL:
    if "://" not in where:
        return _sqlite_url(Path(where))
    try:
        url = make_url(where)
    except ArgumentError as error:
        raise ConfigError("The store's URL cannot be read.") from error
    if url.get_backend_name() == "sqlite":
        return _sqlite_url(Path(url.database or ""))
    if importlib.util.find_spec("asyncpg") is None:
        raise ConfigError(
            "A store in PostgreSQL needs asyncpg, which is not installed.",
            hint=f"Install it with: {install_command('postgres')}",
        )
    return url.set(drivername="postgresql+asyncpg")


def _sqlite_url(path: Path) -> URL:
    if not path.is_file():
        raise NotFoundError(f"There is no store {str(path)!r}.")
    file = f"file:{path.resolve()}"
    return URL.create("sqlite+aiosqlite", database=file, query={"mode": "ro", "uri": "true"})
