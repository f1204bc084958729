"""Reads a store while another process may have it open; locks and changes nothing.

In: a path or a URL. Out: a `StoreReader`, which answers what the routes for inspection ask.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError, NotFoundError
from envserver_records.extras import install_command
from sqlalchemy import URL, event, inspect, make_url, select
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from .damage import decode_all
from .failures import typed_failures
from .groups import arrived_after
from .lookups import GroupLookups
from .rows import GroupRow
from .schema import SCHEMA_VERSION, schema_version


class StoreReader(GroupLookups):
    """The groups of a database with the tables of a store.

    Args:
        name: its path, or its URL without the password.
    """

    def __init__(self, name: str, engine: AsyncEngine) -> None:
        self.name = name
        self._engine = engine

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        return await asyncio.to_thread(decode_all, group_ids, await self.stored_bodies(group_ids))

    async def arrived_after(self, seq: int, limit: int) -> list[GroupRow]:
        """Returns up to `limit` kept groups that arrived after number `seq`, in order."""
        return await self._read(arrived_after, seq, limit)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        with typed_failures():
            async with self._engine.connect() as connection:
                yield connection


@asynccontextmanager
async def open_reader(where: str) -> AsyncIterator[StoreReader]:
    """Opens the store at `where` for reading."""
    url = _locate(where)
    name = where if url.get_backend_name() == "sqlite" else url.render_as_string()
    async with only_reading(url) as engine:
        reader = StoreReader(name, engine)
        async with reader._reading() as connection:
            await _check_version(connection, reader.name)
        yield reader


@asynccontextmanager
async def only_reading(
    url: URL, prepare: Callable[[Any], None] | None = None
) -> AsyncIterator[AsyncEngine]:
    """Connects to a database in a way that cannot change it.

    Args:
        prepare: called with each new connection of SQLite's driver.
    """
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT", hide_parameters=True)
    if url.get_backend_name() == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def only_read(connection: Any, record: object) -> None:
            cursor = connection.cursor()
            cursor.execute("PRAGMA busy_timeout=10000")
            cursor.execute("PRAGMA query_only=ON")
            cursor.close()
            if prepare is not None:
                prepare(connection)

    try:
        yield engine
    finally:
        await engine.dispose()


def sqlite_url(path: Path) -> URL:
    """Returns the URL of a SQLite file that is opened for reading only.
    Raises NotFoundError: there is no such file.
    """
    if not path.is_file():
        raise NotFoundError(f"There is no store {str(path)!r}.")
    file = path.resolve().as_uri()
    return URL.create("sqlite+aiosqlite", database=file, query={"mode": "ro", "uri": "true"})


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
        return sqlite_url(Path(where))
    try:
        url = make_url(where)
    except ArgumentError as error:
        raise ConfigError("The store's URL cannot be read.") from error
    if url.get_backend_name() == "sqlite":
        return sqlite_url(Path(url.database or ""))
    if importlib.util.find_spec("asyncpg") is None:
        raise ConfigError(
            "A store in PostgreSQL needs asyncpg, which is not installed.",
            hint=f"Install it with: {install_command('postgres')}",
        )
    return url.set(drivername="postgresql+asyncpg")
