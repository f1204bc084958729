"""The lookups of a store that read the database. They change nothing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from envserver_records.errors import ConfigError, NotFoundError
from sqlalchemy import URL, event, inspect, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from . import deliveries, groups, leases, listing
from .database import only_query, read_url, typed_failures
from .rows import SETTLED, UNKNOWN_VERSION, GroupState, StoreStatistics
from .schema import SCHEMA_VERSION, SHARED, schema_version
from .transaction import KnownRun, queue_of

if TYPE_CHECKING:
    from .writer import Writer

P = ParamSpec("P")
T = TypeVar("T")


def reads(
    query: Callable[Concatenate[AsyncConnection, P], Awaitable[T]],
) -> Callable[Concatenate[GroupLookups, P], Coroutine[Any, Any, T]]:
    """Makes a method of a query; the query's docstring is the method's."""

    @wraps(query)
    async def method(self: GroupLookups, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._reading() as connection:
            return await query(connection, *args, **kwargs)

    return method


class GroupLookups(ABC):
    """Reads groups from a database with the tables of a store."""

    @abstractmethod
    def _reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Opens a connection that sees what is durable."""

    @abstractmethod
    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        """Returns the bodies of these groups, in order. Raises NotFoundError: a group does not
        exist or is no longer kept; DamagedBodies: see `drop_damaged`."""

    list_groups = reads(listing.page_of)
    seen_tasks = reads(listing.seen_tasks)
    reward_counts = reads(listing.reward_counts)
    rows = reads(groups.rows_of)
    stored_bodies = reads(groups.stored_bodies)


class StoreLookups(GroupLookups):
    _writer: Writer
    _clock: Callable[[], float]

    pending = reads(groups.pending)
    damaged = reads(deliveries.list_damaged)
    existing = reads(groups.existing)
    count_with_prefix = reads(groups.count_with_prefix)
    task_estimates = reads(groups.estimates_after)
    estimates_of = reads(groups.estimates_of)
    made = reads(groups.made)
    count_made = reads(groups.count_made)
    checkpoints = reads(leases.list_checkpoints)
    get_run = reads(leases.get_run)
    list_runs = reads(leases.list_runs)
    get_value = reads(leases.get_value)
    values_with_prefix = reads(leases.values_with_prefix)
    minutes_between = reads(leases.minutes_between)
    find_lease = reads(leases.find_lease)
    open_leases = reads(leases.open_leases)

    async def most_waiting_bytes(self) -> int:
        """Like `most_waiting`, for the size of the bodies in the largest queue."""
        async with self._reading() as connection:
            return await deliveries.waiting_bytes(connection, self._writer.memory.drawn_from())

    async def backlogs(self) -> dict[str, deliveries.Backlog]:
        """Returns for each open run what waits for it, for how long, and what it has leased."""
        async with self._reading() as connection:
            return await deliveries.backlogs(connection, self._writer.memory, self._clock())

    async def leased_groups(self, run: str, limit: int) -> tuple[list[leases.LeasedGroup], int]:
        """Returns up to `limit` groups in a run's open leases, oldest lease first, and how many
        there are."""
        async with self._reading() as connection:
            of = await leases.get_run(connection, run)
            queue = queue_of(of.name, of.delivery)
            found, count = await leases.leased_rows(connection, run, queue, limit)
        now = self._clock()
        return [
            leases.LeasedGroup(group_id, env, leased_at, now - leased_at, expires_at - now)
            for group_id, env, leased_at, expires_at in found
        ], count

    @property
    def statistics(self) -> StoreStatistics:
        return self._writer.statistics

    @property
    def waiting_operations(self) -> int:
        return self._writer.waiting

    @property
    def disk_problem(self) -> str:
        """Why new groups may be refused for lack of disk space; "" if there is space."""
        return self._writer.disk_problem

    async def counts(self) -> dict[GroupState, int]:
        """Returns the number of groups in each state in the shared queue, also removed ones."""
        return self._writer.memory.counts(SHARED)

    @property
    def stored_bytes(self) -> int:
        """Size of the bodies of all groups that are kept, as stored."""
        return self._writer.memory.stored_bytes

    def most_waiting(self) -> int:
        """Returns how many groups wait, or are leased, in the longest queue that a run
        draws from."""
        memory = self._writer.memory
        waiting = dict.fromkeys(memory.drawn_from(), 0)
        for (queue, _, state), count in memory.tallies.items():
            if queue in waiting and state not in SETTLED:
                waiting[queue] += count
        return max(waiting.values(), default=0)

    async def depths(self) -> dict[str, int]:
        """Returns for each open run how many groups are queued or leased for it."""
        known = self.open_runs
        return {name: self.count_of(run, "queued", "leased") for name, run in known.items()}

    async def counters(self) -> dict[str, int]:
        """Returns totals since the store was created: `expired` (leases), `nacked` and `nacked:
        REASON` (leases), `set_aside: REASON`, `rewound`, `stale_dropped` (deliveries), `removed`,
        `damaged` (groups); and since it was opened `conflicting_puts`: puts whose id existed with
        another body (the first body stays). Zero counters are missing."""
        memory = self._writer.memory
        return {**memory.counters, "conflicting_puts": memory.conflicting_puts}

    @property
    def changes(self) -> int:
        """A number that grows when a group is queued (put, moved, given back, expired, rewound) or
        a run is closed."""
        return self._writer.changes.number

    async def wait_for_change(
        self, timeout: float | None = None, *, since: int | None = None
    ) -> int:
        """Waits at most `timeout` seconds until `changes` differs from `since` (None: from its
        value now); returns `changes`. Closing the store also ends the wait. To miss nothing, read
        `changes` before looking at the store, and pass that value as `since`."""
        self._writer.check_open()
        known = self._writer.changes.number if since is None else since
        return await self._writer.changes.wait(known, timeout)

    @property
    def last_seq(self) -> int:
        """`seq` of the group that arrived last, as of the last commit; numbers have no gaps."""
        return self._writer.memory.next_seq - 1

    @property
    def tallies(self) -> Mapping[tuple[str, str, GroupState], int]:
        """Number of deliveries by (queue, environment, state), as of the last commit."""
        return self._writer.memory.tallies

    def may_hold_older(self, version: int) -> bool:
        known = self._writer.memory.versions
        return any(UNKNOWN_VERSION < older < version for older in known)

    @property
    def open_runs(self) -> Mapping[str, KnownRun]:
        """The open runs by name, as of the last commit."""
        known = self._writer.memory.runs
        return {name: run for name, run in known.items() if run.state == "open"}

    def count_of(self, run: KnownRun, *states: GroupState) -> int:
        """Returns how many groups of the run's environments are in these states."""
        return self._writer.memory.in_state(run, states)

    def hungry_for(self, run: str) -> int:
        """Returns the `min_groups` of the run's latest lease if too little was queued, else 0."""
        return self._writer.memory.hungry.get(run, 0)

    @property
    def activity(self) -> int:
        """A number that grows with every change of a delivery or a run."""
        return self._writer.activity.number

    async def wait_for_activity(self, timeout: float | None, *, since: int) -> int:
        self._writer.check_open()
        return await self._writer.activity.wait(since, timeout)


class StoreReader(GroupLookups):
    def __init__(self, name: str, engine: AsyncEngine) -> None:
        self.name = name
        self._engine = engine

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        stored = await self.stored_bodies(group_ids)
        return await asyncio.to_thread(deliveries.decode_all, group_ids, stored)

    arrived_after = reads(groups.arrived_after)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        with typed_failures():
            async with self._engine.connect() as connection:
                yield connection


@asynccontextmanager
async def open_reader(where: str) -> AsyncIterator[StoreReader]:
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
    """Connects to a database in a way that cannot change it."""
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT", hide_parameters=True)
    if url.get_backend_name() == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def only_read(connection: Any, record: object) -> None:
            only_query(connection)
            if prepare is not None:
                prepare(connection)

    try:
        yield engine
    finally:
        await engine.dispose()


def sqlite_url(path: Path) -> URL:
    """Returns the URL of a SQLite file that is opened for reading only."""
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
    url = read_url(where)
    return sqlite_url(Path(url.database or "")) if url.get_backend_name() == "sqlite" else url
