"""Opens the database: where it is, who may have it, which version its tables have.

In: a path or a URL. Out: two SQLAlchemy engines on the same database, one with the single
connection that writes, one that reads. While they are open no other process can open the store:
SQLite's file has a lock file beside it whose lock ends with the process however it ends, PostgreSQL
an advisory lock that ends with the connection that writes.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, AsyncAdaptedQueuePool, event, insert, inspect, make_url, select
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from ..errors import ConfigError, ConflictError
from .failures import typed_failures
from .schema import SCHEMA_VERSION, metadata, schema_version

_READERS: Final = 4
_BUSY_TIMEOUT_MS: Final = 10_000
"""How long a statement waits for another program that has the file open."""
_PAGE_BYTES: Final = 16_384
_CHECKPOINT_PAGES: Final = 1_024
_ADVISORY_KEY: Final = 0x656E7673657276
"""PostgreSQL's name for our lock on a database: "envserv" in bytes."""
_LOCK_WAIT_MS: Final = 3_000
_LOCK_NOT_AVAILABLE: Final = "55P03"


@dataclass(frozen=True)
class Database:
    """An open database. `writer` has one connection; `reader` commits each statement by itself."""

    name: str
    writer: AsyncEngine
    reader: AsyncEngine


@asynccontextmanager
async def open_database(where: str | Path) -> AsyncIterator[Database]:
    """Opens, and creates where missing, the database at `where` and holds it for this process.

    Args:
        where: a path, `sqlite:///path` or `postgresql://user@host/name`.

    Raises:
        ConfigError: no such kind of database, no database of ours, or one of a newer version.
        ConflictError: another process has it open.
        StoreError: it cannot be reached.
    """
    url = _locate(where)
    async with AsyncExitStack() as stack:
        if url.get_backend_name() == "sqlite":
            path = Path(url.database or "")
            with typed_failures():
                _make_folder(path)
                stack.enter_context(_locked_file(path))
            database = _sqlite(url)
        else:
            database = _postgresql(url)
        stack.push_async_callback(database.reader.dispose)
        stack.push_async_callback(database.writer.dispose)
        with typed_failures():
            if url.get_backend_name() == "postgresql":
                # Its first connection takes the lock, before anything is read.
                await (await database.writer.connect()).close()
            await _prepare_tables(database)
        yield database


def _locate(where: str | Path) -> URL:
    """`where` as a URL with a driver; SQLite paths are absolute and links are followed."""
    if isinstance(where, Path) or "://" not in where:
        return _sqlite_url(str(where))
    try:
        url = make_url(where)
    except ArgumentError:
        raise ConfigError("The store's URL cannot be read.", hint=_FORMS) from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        return _sqlite_url(url.database or "")
    if backend not in ("postgresql", "postgres"):
        raise ConfigError(f"A store cannot be kept in {backend!r}.", hint=_FORMS)
    if importlib.util.find_spec("asyncpg") is None:
        raise ConfigError(
            "A store in PostgreSQL needs asyncpg, which is not installed.",
            hint="Install it with: pip install 'envserver[postgres]'",
        )
    return url.set(drivername="postgresql+asyncpg")


_FORMS: Final = "Give a path, sqlite:///path or postgresql://user@host/name."


def _sqlite_url(path: str) -> URL:
    if path in ("", ":memory:"):
        raise ConfigError("A store needs a file: what is in memory is lost.", hint=_FORMS)
    return URL.create("sqlite+aiosqlite", database=str(Path(path).expanduser().resolve()))


def _make_folder(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"The store {path} is a folder.", hint="Name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"The folder of the store {path} cannot be made ({error}).") from error


@contextmanager
def _locked_file(path: Path) -> Iterator[None]:
    """Holds the lock file beside `path`. It is left behind: removing it would let two hold it."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError as error:
        raise ConfigError(f"The store {path} cannot be opened for writing ({error}).") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise _already_open(str(path), holder or "unknown") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _sqlite(url: URL) -> Database:
    # The class is named because the default for SQLite differs between versions of the library.
    shared: dict[str, Any] = {
        "poolclass": AsyncAdaptedQueuePool,
        "max_overflow": 0,
        "hide_parameters": True,
    }
    # No reset: every transaction is ended before its connection goes back.
    writer = create_async_engine(url, pool_size=1, pool_reset_on_return=None, **shared)
    reader = create_async_engine(url, pool_size=_READERS, isolation_level="AUTOCOMMIT", **shared)

    @event.listens_for(writer.sync_engine, "connect")
    def set_up_writer(connection: Any, record: object) -> None:
        # The driver's own implicit BEGIN is deferred and could fail halfway; ours comes below.
        connection.isolation_level = None
        _pragmas(
            connection,
            f"busy_timeout={_BUSY_TIMEOUT_MS}",
            f"page_size={_PAGE_BYTES}",
            "journal_mode=WAL",
            "synchronous=FULL",
            f"wal_autocheckpoint={_CHECKPOINT_PAGES}",
        )

    @event.listens_for(reader.sync_engine, "connect")
    def set_up_reader(connection: Any, record: object) -> None:
        _pragmas(connection, f"busy_timeout={_BUSY_TIMEOUT_MS}", "query_only=ON")

    @event.listens_for(writer.sync_engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return Database(url.database or "", writer, reader)


def _pragmas(connection: Any, *settings: str) -> None:
    cursor = connection.cursor()
    for setting in settings:
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _postgresql(url: URL) -> Database:
    shared: dict[str, Any] = {"max_overflow": 0, "hide_parameters": True, "pool_pre_ping": True}
    writer = create_async_engine(url, pool_size=1, **shared)
    reader = create_async_engine(url, pool_size=_READERS, isolation_level="AUTOCOMMIT", **shared)
    name = url.render_as_string(hide_password=True)

    @event.listens_for(writer.sync_engine, "connect")
    def lock(connection: Any, record: object) -> None:
        # The session that writes holds the lock: when it is free, its last commit is visible.
        # A server process notices the end of its client with some delay, hence the wait.
        cursor = connection.cursor()
        try:
            cursor.execute(f"SET lock_timeout = {_LOCK_WAIT_MS}")
            cursor.execute(f"SELECT pg_advisory_lock({_ADVISORY_KEY})")
            cursor.execute("SET lock_timeout = 0")
        except Exception as error:
            if getattr(error, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            raise _already_open(name, "perhaps on another machine") from error
        finally:
            cursor.close()
        connection.commit()

    return Database(name, writer, reader)


def _already_open(name: str, holder: str) -> ConflictError:
    return ConflictError(
        f"The store {name} is open in another process ({holder}).",
        hint="Stop that one first, or name another --store.",
        store=name,
    )


async def _prepare_tables(database: Database) -> None:
    """Creates the tables in an empty database; refuses one that is not ours, unchanged."""
    async with database.reader.connect() as connection:
        names = set(await connection.run_sync(lambda sync: inspect(sync).get_table_names()))
        if schema_version.name in names:
            _check_version(database.name, await connection.scalar(select(schema_version.c.version)))
            return
    # A file belongs to one program; a PostgreSQL database may hold tables of others too.
    is_file = database.reader.dialect.name == "sqlite"
    foreign = names if is_file else names & set(metadata.tables)
    if foreign:
        raise ConfigError(
            f"{database.name} is a database of another program (it has a table {min(foreign)}).",
            hint="Name another --store.",
        )
    async with database.writer.begin() as connection:
        await connection.run_sync(metadata.create_all)
        await connection.execute(insert(schema_version).values(version=SCHEMA_VERSION))


def _check_version(name: str, version: int | None) -> None:
    if version == SCHEMA_VERSION:
        return
    if version is not None and version > SCHEMA_VERSION:
        raise ConfigError(
            f"The store {name} was written by a newer envserver (its tables have version {version},"
            f" this one knows {SCHEMA_VERSION}).",
            hint="Upgrade envserver, or name another --store.",
        )
    raise ConfigError(f"The store {name} has tables of an unknown version ({version}).")
