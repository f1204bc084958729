"""Opens the database: finds its location, locks it for this process, checks the version of its
tables, and runs its write transactions by the store's clock.

While it is open no other process can open the store. SQLite uses a lock file beside the database,
whose lock ends with the process; PostgreSQL an advisory lock, which ends with the connection that
writes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import importlib.util
import itertools
import os
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import structlog
from envserver_records.errors import (
    ConfigError,
    ConflictError,
    EnvserverError,
    InputError,
    StoreError,
    StoreFull,
    StoreLost,
)
from envserver_records.extras import install_command
from envserver_records.waiting import Backoff
from sqlalchemy import (
    URL,
    AsyncAdaptedQueuePool,
    Connection,
    CursorResult,
    Dialect,
    Engine,
    QueuePool,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from .packed import DamagedBody
from .reserve import Reserve
from .schema import SCHEMA_VERSION, create_tables, metadata, migrate, schema_version

_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_SQLSTATES: Final = frozenset({"53100"})  # PostgreSQL: disk_full
_UNREACHABLE_SQLSTATES: Final = frozenset(
    {"57P01", "57P02", "57P03", "53300"}
)  # PostgreSQL: shutting down, crashed, starting, or too many clients
_FULL_SQLITE: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})
_NOT_WRITABLE: Final = {
    sqlite3.SQLITE_BUSY: "Another program has locked its file: end that one.",
    sqlite3.SQLITE_READONLY: "Let this user write the file, or name another one by --store.",
    sqlite3.SQLITE_CANTOPEN: "Let this user write the file's folder, or name another --store.",
}
_SQLITE_PRIMARY: Final = 0xFF
"""The low byte of SQLite's extended error codes is the kind of failure."""


def typed(error: Exception) -> Exception:
    """Returns `error` as StoreFull, InputError, ConfigError or StoreError; unchanged if none fits.
    The text contains no SQL and no values, because they may contain a body."""
    cause = _cause_of(error)
    if isinstance(cause, EnvserverError):
        return cause
    if _is_full(cause):
        return StoreFull(
            f"The store has no space left ({cause}).", hint="Free space, then continue."
        )
    if _sqlite_code(cause) & _SQLITE_PRIMARY == sqlite3.SQLITE_NOTADB:
        return ConfigError(
            "The store's file is not an SQLite database.", hint="Name another --store."
        )
    if _is_bad_value(cause):
        return InputError(f"A value cannot be stored ({cause}).", place="value")
    if isinstance(cause, DamagedBody):
        return StoreError(f"A stored body is damaged ({cause}).")
    if hint := _NOT_WRITABLE.get(_sqlite_code(cause) & _SQLITE_PRIMARY):
        return StoreError(f"The store cannot be written ({cause}).", hint=hint)
    if isinstance(error, SQLAlchemyError | sqlite3.Error | OSError):
        return StoreError(f"The store failed ({type(cause).__name__}: {cause}).")
    return error


def is_unreachable(error: Exception) -> bool:
    """Returns whether the database does not answer, as opposed to reporting an error."""
    cause = _cause_of(error)
    sqlstate = _sqlstate(cause)
    return (
        (isinstance(error, DBAPIError) and error.connection_invalidated)
        or isinstance(cause, ConnectionError | TimeoutError | socket.gaierror)
        or sqlstate[:2] == "08"
        or sqlstate in _UNREACHABLE_SQLSTATES
    )


@contextmanager
def typed_failures() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        better = typed(error)
        if better is error:
            raise
        raise better from error


def _cause_of(error: Exception) -> BaseException:
    return (error.orig or error) if isinstance(error, StatementError) else error


def _sqlstate(cause: object) -> str:
    return getattr(cause, "sqlstate", None) or ""


def _sqlite_code(cause: object) -> int:
    return getattr(cause, "sqlite_errorcode", 0)


def _is_full(cause: object) -> bool:
    if isinstance(cause, OSError) and cause.errno in _FULL_ERRNOS:
        return True
    code = _sqlite_code(cause)
    return (
        code in _FULL_SQLITE
        or code & _SQLITE_PRIMARY == sqlite3.SQLITE_FULL
        or _sqlstate(cause) in _FULL_SQLSTATES
    )


def _is_bad_value(cause: object) -> bool:
    """Returns whether a value cannot be stored: not UTF-8, beyond 64 bits, or too large."""
    is_bad = isinstance(cause, UnicodeError | OverflowError | sqlite3.DataError)
    return is_bad or _sqlstate(cause)[:2] == "22"


def already_open(name: str, holder: str) -> ConflictError:
    return ConflictError(
        f"The store {name} is open in another process ({holder}).",
        hint="Stop that one first, or name another --store.",
        store=name,
    )


T = TypeVar("T")
Work = Callable[[AsyncConnection], Coroutine[Any, Any, T]]


class AsyncWriteConnection:
    """The one connection that writes, one transaction at a time, durable when `transact` returns,
    rolled back if its work raises. If cancelled, the transaction has ended, committed or not."""

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
    """The same for a blocking driver, in its own thread. Work may only await its connection, which
    is kept from one transaction to the next, and closed after one that failed."""

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
        """Runs a statement by the driver itself: SQLAlchemy would take longer than SQLite."""
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
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    coroutine.close()
    raise RuntimeError("A write operation awaited something other than its connection.")


# SQLite goes on writing to a file that was removed or replaced, and those writes would be lost. So
# the files are checked around every commit.


def make_folder(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"The store {path} is a folder.", hint="Give the path of a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"The folder of the store {path} cannot be created ({error}).") from error


class Files:
    """The identities of SQLite's files, as this process first saw them."""

    def __init__(self, path: Path, lock_path: Path) -> None:
        self._log = path.with_name(path.name + "-wal")
        self._wanted = (path, self._log, lock_path)
        self._seen: dict[Path, tuple[int, int]] = {}

    def begin(self) -> None:
        """Call for each new connection: the log is a new file if no other connection was open."""
        self._seen.pop(self._log, None)

    def check(self) -> None:
        """Raises StoreLost if a file was removed or replaced, because what is written would be
        lost."""
        for path in self._wanted:
            try:
                found = path.stat()
            except FileNotFoundError:
                if path not in self._seen:
                    continue
                raise _lost(path, "has been removed") from None
            identity = (found.st_dev, found.st_ino)
            if self._seen.setdefault(path, identity) != identity:
                raise _lost(path, "has been replaced")


def _lost(path: Path, what: str) -> StoreLost:
    return StoreLost(
        f"The store's file {path} {what} while it was open.",
        hint="Put the files back as they were, and start again.",
    )


@contextmanager
def locked_file(path: Path) -> Iterator[Files]:
    """Locks the file PATH.lock. It is left behind: removing it would let two processes lock it."""
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
            raise already_open(str(path), holder or "unknown") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
        yield Files(path, lock_path)
    finally:
        os.close(descriptor)


log = structlog.get_logger(__name__)

_READERS: Final = 4
_BUSY_TIMEOUT_MS: Final = 10_000
"""Maximum wait of a statement while another program has the file locked."""
_PAGE_BYTES: Final = 16_384
_CHECKPOINT_PAGES: Final = 1_024
_ADVISORY_KEY: Final = 0x656E7673657276
"""Key of the advisory lock in PostgreSQL: "envserv" in bytes."""
_LOCK_WAIT_SECONDS: Final = 3.0
_SHARED_LOCK_WAIT_SECONDS: Final = 0.1
"""A server that shares the store looks again and again whether the lock is free."""
_LOCK_NOT_AVAILABLE: Final = "55P03"
_SESSION: Final = (
    # A commit that has returned is on disk, whatever the settings of the server are.
    "SELECT set_config('synchronous_commit', 'on', false)"
    " WHERE current_setting('synchronous_commit') = 'off'",
    # The lock of a machine that is gone is released within a minute.
    "SET tcp_keepalives_idle = 30",
    "SET tcp_keepalives_interval = 10",
    "SET tcp_keepalives_count = 3",
)
_START_BACKOFF: Final = Backoff(first_seconds=0.1, max_seconds=2.0)
_HELD: Final = (
    " FROM pg_locks WHERE locktype = 'advisory' AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    f" AND (classid::bigint << 32) + objid::bigint = {_ADVISORY_KEY}"
)
HOLDER: Final = text(f"SELECT pid{_HELD}")
"""Selects the process id of the session that holds the lock."""
END_SESSION: Final = text(f"SELECT pg_terminate_backend(pid){_HELD} AND pid = :pid")
"""Ends the session `pid`, if it holds the lock."""
_NOW: Final = text("SELECT extract(epoch FROM clock_timestamp())")
CLOSE_SECONDS = 5.0
CONNECT_SECONDS = 10.0
COMMAND_SECONDS = 60.0
"""Seconds after which a statement or a commit of PostgreSQL counts as failed."""


@dataclass
class Database:
    """An open database. `writer` has one connection; `reader` commits each statement by itself.

    Args:
        files: the files of SQLite; None for PostgreSQL.
        reserve: space held back on the disk of SQLite's file; None: none.
        sessions: connections that `writer` has had. When it grows, another process may have had the
            store in between.
        session_pid: process id of the latest of them at PostgreSQL.
    """

    name: str
    writer: AsyncWriteConnection | ThreadWriteConnection
    reader: AsyncEngine
    files: Files | None = None
    reserve: Reserve | None = None
    sessions: int = 0
    session_pid: int = 0

    def check_files(self) -> None:
        if self.files is not None:
            self.files.check()

    async def now(self) -> float:
        """Returns seconds since the epoch: by PostgreSQL, so that all servers agree that have the
        store one after the other; by this machine for SQLite."""
        if self.files is not None:
            return time.time()
        async with self.reader.connect() as connection:
            return float(await connection.scalar(_NOW))

    async def end_former_session(self) -> None:
        """Asks PostgreSQL to end a lost connection of this process that still holds the lock."""
        async with self.reader.connect() as connection:
            await connection.execute(END_SESSION, {"pid": self.session_pid})


@asynccontextmanager
async def open_database(
    where: str | Path,
    wait_seconds: float = 0.0,
    reserve_bytes: int = 0,
    *,
    shared: bool = False,
) -> AsyncIterator[Database]:
    """Opens the database at `where`, or creates it, and locks it for this process; see
    `open_store`."""
    url = locate(where)
    async with AsyncExitStack() as stack:
        if url.get_backend_name() == "sqlite":
            path = Path(url.database or "")
            with typed_failures():
                make_folder(path)
                files = stack.enter_context(locked_file(path))
            database = _sqlite(url, files)
            if reserve_bytes:
                database.reserve = Reserve(path, reserve_bytes)
                database.reserve.begin()
        else:
            wait = _SHARED_LOCK_WAIT_SECONDS if shared else _LOCK_WAIT_SECONDS
            database = _postgresql(url, wait)
        stack.push_async_callback(_close, database)
        with typed_failures():
            if url.get_backend_name() == "postgresql":
                await _connect(database, wait_seconds)
            await _prepare_tables(database)
            database.check_files()
        yield database


async def _connect(database: Database, wait_seconds: float) -> None:
    """Makes the first connection, which takes the lock before anything is read. A server and its
    database may be started in any order: retries for `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    for tries in itertools.count(1):
        try:
            await database.writer.connect()
        except Exception as error:
            pause = _START_BACKOFF.seconds(tries)
            if not is_unreachable(error) or time.monotonic() + pause > deadline:
                raise
            if tries == 1:
                reason = typed(error).args[0]
                log.warning("waiting_for_database", reason=reason, at_most_seconds=wait_seconds)
            await asyncio.sleep(pause)
        else:
            if tries > 1:
                log.info("database_answers", tries=tries)
            return


async def _close(database: Database) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS if database.files is None else None):
            await database.writer.dispose()
            await database.reader.dispose()
    except TimeoutError:
        log.warning("database_did_not_close", store=database.name)


def locate(where: str | Path) -> URL:
    """Returns `where` as a URL with a driver; SQLite paths are absolute, with links resolved."""
    if isinstance(where, Path) or "://" not in where:
        return _sqlite_url(str(where))
    url = read_url(where)
    return _sqlite_url(url.database or "") if url.get_backend_name() == "sqlite" else url


def read_url(where: str) -> URL:
    """Returns the URL as written for SQLite, with a driver for PostgreSQL."""
    try:
        url = make_url(where)
    except ArgumentError:
        raise ConfigError("The store's URL cannot be read.", hint=_FORMS) from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        return url
    if backend not in ("postgresql", "postgres"):
        raise ConfigError(f"A store cannot be kept in {backend!r}.", hint=_FORMS)
    if importlib.util.find_spec("asyncpg") is None:
        raise ConfigError(
            "A store in PostgreSQL needs asyncpg, which is not installed.",
            hint=f"Install it with: {install_command('postgres')}",
        )
    return url.set(drivername="postgresql+asyncpg")


_FORMS: Final = "Give a path, sqlite:///path or postgresql://user@host/name."


def _sqlite_url(path: str) -> URL:
    if path in ("", ":memory:"):
        raise ConfigError("A store needs a file; an in-memory database would be lost.", hint=_FORMS)
    return URL.create("sqlite+aiosqlite", database=str(Path(path).expanduser().resolve()))


def _sqlite(url: URL, files: Files) -> Database:
    # The class is named because the default for SQLite differs between versions of the library.
    shared: dict[str, Any] = {"max_overflow": 0, "hide_parameters": True}
    writer = create_engine(
        url.set(drivername="sqlite+pysqlite"),
        poolclass=QueuePool,
        pool_size=1,
        # Every transaction has ended before its connection goes back.
        pool_reset_on_return=None,
        **shared,
    )
    reader = create_async_engine(
        url,
        poolclass=AsyncAdaptedQueuePool,
        pool_size=_READERS,
        isolation_level="AUTOCOMMIT",
        **shared,
    )
    database = Database(url.database or "", ThreadWriteConnection(writer), reader, files)

    @event.listens_for(writer, "connect")
    def set_up_writer(connection: Any, record: object) -> None:
        database.sessions += 1
        files.begin()
        # The driver's implicit BEGIN is deferred and could fail later; `begin` below is explicit.
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
        only_query(connection)

    @event.listens_for(writer, "begin")
    def begin(connection: Any) -> None:
        connection.connection.driver_connection.execute("BEGIN IMMEDIATE")

    return database


def only_query(connection: Any) -> None:
    _pragmas(connection, f"busy_timeout={_BUSY_TIMEOUT_MS}", "query_only=ON")


def _pragmas(connection: Any, *settings: str) -> None:
    cursor = connection.cursor()
    for setting in settings:
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _postgresql(url: URL, lock_wait_seconds: float) -> Database:
    shared: dict[str, Any] = {
        "max_overflow": 0,
        "hide_parameters": True,
        "pool_pre_ping": True,
        "connect_args": {"timeout": CONNECT_SECONDS, "command_timeout": COMMAND_SECONDS},
    }
    writer = create_async_engine(url, pool_size=1, **shared)
    reader = create_async_engine(url, pool_size=_READERS, isolation_level="AUTOCOMMIT", **shared)
    name = url.render_as_string(hide_password=True)
    database = Database(name, AsyncWriteConnection(writer), reader)

    @event.listens_for(writer.sync_engine, "connect")
    def lock(connection: Any, record: object) -> None:
        # The session that writes holds the lock: when it is free, its last commit is visible.
        # A server process notices the end of its client with some delay, hence the wait.
        cursor = connection.cursor()
        try:
            cursor.execute(f"SET lock_timeout = {round(1000 * lock_wait_seconds)}")
            cursor.execute(f"SELECT pg_advisory_lock({_ADVISORY_KEY}), pg_backend_pid()")
            [(_, database.session_pid)] = cursor.fetchall()
            cursor.execute("SET lock_timeout = 0")
            for setting in _SESSION:
                cursor.execute(setting)
        except Exception as error:
            if getattr(error, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            raise already_open(name, "perhaps on another machine") from error
        finally:
            cursor.close()
        connection.commit()
        database.sessions += 1

    return database


async def _prepare_tables(database: Database) -> None:
    """Creates or updates the tables; a database of another program is refused, unchanged."""
    async with database.reader.connect() as connection:
        names = set(await connection.run_sync(lambda sync: inspect(sync).get_table_names()))
        is_ours = schema_version.name in names
        version = await connection.scalar(select(schema_version.c.version)) if is_ours else None
    if is_ours:
        if _check_version(database.name, version) < SCHEMA_VERSION:
            await _bring_up_to_date(database)
        return
    # A file belongs to one program; a PostgreSQL database may hold tables of others as well.
    is_file = database.reader.dialect.name == "sqlite"
    foreign = names if is_file else names & set(metadata.tables)
    if foreign:
        raise ConfigError(
            f"{database.name} is a database of another program (it has a table {min(foreign)}).",
            hint="Name another --store.",
        )
    await database.writer.transact(_create_tables)


async def _create_tables(connection: AsyncConnection) -> None:
    await connection.run_sync(create_tables)
    await connection.execute(insert(schema_version).values(version=SCHEMA_VERSION))


async def _bring_up_to_date(database: Database) -> None:
    async def change(connection: AsyncConnection) -> None:
        # Read it again inside the transaction that changes it.
        version = await connection.scalar(select(schema_version.c.version))
        log.info("store_migrates", store=database.name, version=version, to=SCHEMA_VERSION)
        await migrate(connection, _check_version(database.name, version))

    await database.writer.transact(change)


def _check_version(name: str, version: int | None) -> int:
    if version is not None and 1 <= version <= SCHEMA_VERSION:
        return version
    if version is not None and version > SCHEMA_VERSION:
        raise ConfigError(
            f"The store {name} was written by a newer envserver (its tables have version {version},"
            f" this one knows {SCHEMA_VERSION}).",
            hint="Upgrade envserver, or name another --store.",
        )
    raise ConfigError(f"The store {name} has tables of an unknown version ({version}).")


# The store's time: a lease lasts as long as it was granted, also while the machine sleeps; setting
# the wall clock has no effect on it. A restart begins at the wall clock's time or at the last saved
# time, whichever is later.


def passing_seconds() -> float:
    """Returns seconds since an arbitrary moment, counting the time that the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """The wall clock's time at construction, plus the seconds that have passed since."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        passing: Callable[[], float] = passing_seconds,
    ) -> None:
        self._passing = passing
        self._offset = wall() - passing()

    def __call__(self) -> float:
        return self._passing() + self._offset


class ForwardClock:
    """`source`, shifted to begin at `earliest` or later; it never goes back."""

    def __init__(self, source: Callable[[], float], earliest: float) -> None:
        self._source = source
        self._offset = max(0.0, earliest - source())
        self._latest = earliest

    def __call__(self) -> float:
        self._latest = max(self._latest, self._source() + self._offset)
        return self._latest


_BACKOFF: Final = Backoff(first_seconds=0.1, max_seconds=5.0)


class DatabaseUnreachable(StoreError):
    """The database did not answer, or the next retry is not due yet."""


class RetryGate:
    """Rejects calls at once until the next retry is due; retries are 0.1 to 5 seconds apart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._next_try = 0.0
        self._why = ""

    def check(self) -> None:
        """Raises DatabaseUnreachable if the last try failed and the next one is not due yet."""
        left = self._next_try - self._clock()
        if left > 0:
            raise DatabaseUnreachable(self._why, hint=f"The next retry is in {left:.1f} seconds.")

    def failed(self, error: DatabaseUnreachable) -> None:
        """Records a failed try; the pause grows with each one. Rejections do not count."""
        if self._next_try > self._clock():
            return
        self._why = error.message
        self._failures += 1
        self._next_try = self._clock() + _BACKOFF.seconds(self._failures)

    def open(self) -> None:
        self._next_try = 0.0

    def worked(self) -> None:
        self._failures = 0
