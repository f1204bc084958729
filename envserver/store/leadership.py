"""Several servers on one PostgreSQL: one leads, the others follow and take over.

The server whose session holds the store's lock leads. It renews its row every second; the others
look at the row and at the lock four times a second, and a notification makes them look at once.

Only the leader writes, because the session that writes holds the lock. A leader that is silent
while its session still holds the lock (its process is stopped, its machine is gone) loses that
session: a follower has PostgreSQL end it. What it had not committed is rolled back, and when it
wakes it finds another owner in the store and ends (`StoreLost`). Silence is counted in looks that
saw the same beat, so neither a database that pauses nor a follower that does counts as a silent
leader. No clocks of two machines are compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
from envserver_records.errors import ConfigError, ConflictError, StoreError, StoreFull
from envserver_records.waiting import cancel_and_wait
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from .database import END_SESSION, HOLDER, is_unreachable, locate, typed
from .sql import open_store
from .writer import Leader, read_leader, renew

if TYPE_CHECKING:
    from .sql import Store

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 0.25
BEAT_SECONDS: Final = 1.0
_BEATS: Final = 4
"""Beats, at least, that a leader must miss before its session is ended."""
_STATEMENT_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 2.0
_CHANNEL: Final = "envserver_leader"
_FOLLOWS: Final = "envserver+ "
"""Begins the application name of a follower's session, by which the leader knows who follows."""
_NAME: Final = text("SELECT set_config('application_name', :name, false)")
_FOLLOWERS: Final = text(
    "SELECT DISTINCT application_name FROM pg_stat_activity WHERE datname = current_database()"
    " AND starts_with(application_name, :prefix) ORDER BY application_name"
)
_UNKNOWN_TABLE: Final = "42P01"


@dataclass(frozen=True)
class _Look:
    leader: Leader | None
    holder: int | None

    @property
    def leads(self) -> Leader | None:
        """The owner, if its session holds the lock now and may be ended."""
        same = self.leader is not None and self.leader.pid == self.holder
        return self.leader if same else None


class Leadership:
    """This server's part among the servers of a store. `takeover_seconds`: silence after which a
    leader's session is ended; the same for all servers of a store."""

    def __init__(self, where: str, engine: AsyncEngine, takeover_seconds: float) -> None:
        self.url = ""
        """Where the other servers reach this one; set it before `lead`."""
        self.leader: Leader | None = None
        """The server that leads and answers, as last seen; None: none is known, or this one leads.
        """
        self.leads = False
        self.owner = ""
        """This server's id as the leader, which marks requests that followers pass on."""
        self.followers: list[str] = []
        """Addresses of the servers that follow this one."""
        self.changed: Callable[[str], None] = lambda owner: None
        """Called with the id of a new leader, which may be this server."""
        self._where = where
        self._engine = engine
        self._takeover_seconds = takeover_seconds
        self._connection: AsyncConnection | None = None
        self._woken = asyncio.Event()
        self._answers = False
        self._reachable = True
        self._was_reached = False
        self._since = 0.0
        self._beating: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def lead(self) -> AsyncIterator[Store]:
        """Waits until this server leads; yields the open store."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end_beats)
            while True:
                await self._follow()
                try:
                    store = await stack.enter_async_context(open_store(self._where, shared=True))
                    break
                except ConflictError:
                    log.info("another_server_was_first")
                except StoreFull:
                    raise
                except StoreError as error:
                    log.warning("cannot_lead", error=str(error))
                    await asyncio.sleep(BEAT_SECONDS)
            assert store.owner is not None
            self.leads, self.leader, self.owner = True, None, store.owner
            self._since = time.time()
            log.info("leads", url=self.url)
            self.changed(self.owner)
            self._beating = asyncio.create_task(self._beat(store), name="leader")
            yield store

    def answer(self) -> None:
        """Announces that this leader answers requests from now on."""
        self._answers = True
        self._woken.set()

    def facts(self) -> dict[str, Any]:
        """Returns what a leader's `/v1/status` says."""
        return {"url": self.url, "since": self._since, "followers": self.followers}

    async def _follow(self) -> None:
        """Returns when no session holds the lock; ends that of a leader that is silent."""
        loop = asyncio.get_running_loop()
        seen: Leader | None = None
        silent_seconds = earliest = 0.0
        last = loop.time()
        while True:
            look = await self._look()
            now, last_look = loop.time(), last
            last = now
            if look is None:
                # The leader has lost its session, too. It is warm: it may take the lock first.
                seen, earliest = None, now + self._takeover_seconds if self._was_reached else 0.0
            else:
                self._know(look.leads)
                if look.holder is None and now >= earliest:
                    return
                if look.leads is None or look.leads != seen:
                    seen, silent_seconds = look.leads, 0.0
                else:
                    # A follower that slept itself has seen nothing meanwhile.
                    silent_seconds += min(now - last_look, 2 * LOOK_SECONDS)
                if seen is not None and silent_seconds >= self._takeover_seconds:
                    silent_seconds = 0.0
                    await self._end_session(seen)
            await self._pause(LOOK_SECONDS)

    def _know(self, leads: Leader | None) -> None:
        before = self.leader
        self.leader = leads if leads is not None and leads.url else None
        after = self.leader
        if after is not None and (before is None or before.owner != after.owner):
            log.info("follows", leader=after.url, url=self.url)
            self.changed(after.owner)
        elif after is None and before is not None:
            log.warning("no_leader", former=before.url)

    async def _look(self) -> _Look | None:
        """Returns None if the database does not answer."""
        try:
            connection = await self._connected()
            holder = await connection.scalar(HOLDER)
            look = _Look(await self._row(connection), holder)
        except (SQLAlchemyError, OSError) as error:
            await self._disconnect()
            if not (self._was_reached or is_unreachable(error)):
                raise typed(error) from error
            if self._reachable:
                log.warning("waiting_for_database", reason=str(typed(error)))
            self._reachable = False
            return None
        self._reachable = self._was_reached = True
        return look

    async def _row(self, connection: AsyncConnection) -> Leader | None:
        try:
            return await read_leader(connection)
        except ProgrammingError as error:
            if getattr(error.orig, "sqlstate", "") != _UNKNOWN_TABLE:
                raise
            return None  # the first server has not made the tables yet

    async def _end_session(self, silent: Leader) -> None:
        log.warning("leader_is_silent", leader=silent.url, seconds=self._takeover_seconds)
        try:
            await (await self._connected()).execute(END_SESSION, {"pid": silent.pid})
        except (SQLAlchemyError, OSError) as error:
            log.error("session_not_ended", error=str(typed(error)))
            await self._disconnect()

    async def _beat(self, store: Store) -> None:
        """Renews this leader's row until cancelled, or until another server has the store."""
        named = ""
        number = 0
        while True:
            number += 1
            url = self.url if self._answers else ""
            row = Leader(self.owner, store.database.session_pid, number, url, self._since)
            try:
                connection = await self._connected()
                if not await renew(connection, row):
                    log.error("leads_no_longer", url=self.url)
                    return  # the next change finds that the store is lost, and ends this server
                if url != named:
                    await self._notify(connection)
                    named = url
                names = await connection.scalars(_FOLLOWERS, {"prefix": _FOLLOWS})
                self.followers = [name.removeprefix(_FOLLOWS) for name in names]
            except (SQLAlchemyError, OSError) as error:
                if self._reachable:
                    log.warning("beat_failed", error=str(typed(error)))
                self._reachable = False
                await self._disconnect()
            else:
                if not self._reachable:
                    store.try_again()  # before a follower finds the lock free
                self._reachable = True
            await self._pause(min(BEAT_SECONDS, self._takeover_seconds / _BEATS))

    async def _end_beats(self) -> None:
        self.leads = False
        if self._beating is None:
            return
        await cancel_and_wait(self._beating)
        with suppress(SQLAlchemyError, OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._notify(await self._connected())

    async def _notify(self, connection: AsyncConnection) -> None:
        await connection.execute(text(f"NOTIFY {_CHANNEL}"))

    async def _pause(self, seconds: float) -> None:
        """Waits, but not after a notification or `answer`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()

    async def _connected(self) -> AsyncConnection:
        if self._connection is None:
            connection = await self._engine.connect()
            self._connection = connection
            await self._listen(connection)
        name = "envserver leads" if self.leads else f"{_FOLLOWS}{self.url}"
        if self._connection.info.get("envserver") != name:
            self._connection.info["envserver"] = name
            await self._connection.execute(_NAME, {"name": name})
        return self._connection

    async def _listen(self, connection: AsyncConnection) -> None:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        try:
            await driver.add_listener(_CHANNEL, lambda *heard: self._woken.set())
        except Exception as error:  # the driver's own errors have no class that we may import
            raise ConnectionError(f"LISTEN failed: {error}") from error

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError, OSError):
                await connection.invalidate()
                await connection.close()

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._disconnect()
                await self._engine.dispose()


@asynccontextmanager
async def leadership(where: str, takeover_seconds: float) -> AsyncIterator[Leadership]:
    """Prepares to share the store at `where`, over one connection to the database."""
    url = locate(where)
    if url.get_backend_name() == "sqlite":
        raise ConfigError(
            "Several servers cannot share an SQLite store: its file belongs to one process.",
            hint="Give all of them the same --store postgresql://user@host/name.",
        )
    engine = create_async_engine(
        url,
        pool_size=1,
        max_overflow=0,
        hide_parameters=True,
        isolation_level="AUTOCOMMIT",
        connect_args={"timeout": _STATEMENT_SECONDS, "command_timeout": _STATEMENT_SECONDS},
    )
    made = Leadership(where, engine, takeover_seconds)
    try:
        yield made
    finally:
        await made.close()
