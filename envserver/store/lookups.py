"""The lookups of a store that read the database. They change nothing."""

from __future__ import annotations

import asyncio
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec
from envserver_records.errors import ConfigError, NotFoundError
from envserver_records.extras import install_command
from envserver_records.records import Split
from sqlalchemy import (
    URL,
    Integer,
    case,
    cast,
    event,
    func,
    inspect,
    literal_column,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from ..rollouts.estimates import Estimate
from . import runs
from .database import typed_failures
from .deliveries import Backlog, backlogs, decode_all, list_damaged
from .groups import (
    EstimateRow,
    arrived_after,
    count_drops_with_prefix,
    count_with_prefix,
    counted_drops,
    estimates_after,
    estimates_of,
    pending,
    rows_of,
    seqs_of,
    stored_bodies,
)
from .leases import LeasedGroup, LeaseFacts, facts_where, leased_rows
from .listing import (
    GroupQuery,
    Page,
    TaskOrder,
    TasksPage,
    filters_of,
    joined_tables,
    page_of,
    seen_tasks,
)
from .rows import (
    SETTLED,
    UNKNOWN_VERSION,
    Checkpoint,
    DamagedGroup,
    GroupRow,
    GroupState,
    Run,
    StoreStatistics,
)
from .runs import list_checkpoints, minutes_between
from .schema import SCHEMA_VERSION, SHARED, deliveries, group_facts, leases, schema_version
from .transaction import KnownRun, queue_of

if TYPE_CHECKING:
    from .writer import Writer


BINS: Final = 20


class RewardCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by mean reward.

    Args:
        groups: all that match; `unscored` of them have no mean reward.
        low, high: ends of the bins: 0 and 1 if all means lie between, else the least and the
            greatest; None without a mean.
        counts: groups in each of `BINS` equal bins, which have their lower ends; the last has both.
    """

    groups: int
    unscored: int
    low: float | None
    high: float | None
    counts: list[int]


async def reward_counts(connection: AsyncConnection, query: GroupQuery) -> RewardCounts:
    mean = group_facts.c.reward_mean
    ends = func.count(), func.count(mean), func.min(mean), func.max(mean)
    found = select(*ends).select_from(joined_tables()).where(*filters_of(query))
    groups, scored, least, greatest = (await connection.execute(found)).one()
    if not scored:
        return RewardCounts(groups=groups, unscored=groups, low=None, high=None, counts=[])
    low, high = (0.0, 1.0) if least >= 0 and greatest <= 1 else (least, greatest)
    # Rounded, because the bounds become a filter: 3 / 20 belongs to the bin that 0.15 begins.
    bounds = [float(f"{low + (high - low) * n / BINS:.9g}") for n in range(1, BINS)]
    above = [func.sum(cast(case((mean >= bound, 1), else_=0), Integer)) for bound in bounds]
    sums = select(*above).select_from(joined_tables()).where(mean.is_not(None), *filters_of(query))
    at_least = [scored, *(await connection.execute(sums)).one(), 0]
    return RewardCounts(
        groups=groups,
        unscored=groups - scored,
        low=low,
        high=high,
        counts=[more - fewer for more, fewer in pairwise(at_least)],
    )


P = ParamSpec("P")
T = TypeVar("T")


class GroupLookups(ABC):
    """Reads groups from a database with the tables of a store."""

    @abstractmethod
    def _reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Opens a connection that sees what is durable."""

    @abstractmethod
    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        """Returns the bodies of these groups, in order. Raises NotFoundError: a group does not
        exist or is no longer kept; DamagedBodies: see `drop_damaged`."""

    async def _read(
        self,
        query: Callable[Concatenate[AsyncConnection, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        async with self._reading() as connection:
            return await query(connection, *args, **kwargs)

    async def list_groups(self, query: GroupQuery, cursor: str, limit: int) -> Page:
        """Returns a page of kept groups; see `listing.page_of`."""
        return await self._read(page_of, query, cursor, limit)

    async def seen_tasks(
        self, order: TaskOrder, cursor: str, limit: int, *, environment: str = "", text: str = ""
    ) -> TasksPage:
        """Returns a page of tasks, as their kept groups show them; see `SeenTask`."""
        return await self._read(
            seen_tasks, order, cursor, limit, environment=environment, text=text
        )

    async def reward_counts(self, query: GroupQuery) -> RewardCounts:
        """Counts the kept groups that `query` matches, by mean reward, in two passes over their
        facts."""
        return await self._read(reward_counts, query)

    async def rows(self, group_ids: Sequence[str]) -> list[GroupRow]:
        """Returns these groups without their bodies, in order, each once. Raises as `bodies`."""
        return await self._read(rows_of, group_ids)

    async def stored_bodies(self, group_ids: Sequence[str]) -> list[tuple[int, bytes]]:
        """Like `bodies`, but returns each body's encoding and encoded bytes (`packed.py`)."""
        return await self._read(stored_bodies, group_ids)


class StoreLookups(GroupLookups):
    _writer: Writer
    _clock: Callable[[], float]

    async def pending(self) -> list[GroupRow]:
        """Returns the queued and buffered groups of the shared queue, oldest first."""
        return await self._read(pending)

    async def most_waiting_bytes(self) -> int:
        """Like `most_waiting`, for the size of the bodies in the largest queue."""
        of = deliveries.c
        where = (of.queue.in_(sorted(self._writer.memory.drawn_from())), of.settled_at.is_(None))
        query = select(func.sum(of.stored_bytes)).where(*where).group_by(of.queue)
        async with self._reading() as connection:
            return max((int(size) for size in await connection.scalars(query)), default=0)

    async def damaged(self, limit: int) -> list[DamagedGroup]:
        """Returns up to `limit` groups whose bodies are damaged, latest found first."""
        return await self._read(list_damaged, limit)

    async def existing(self, group_ids: Sequence[str]) -> set[str]:
        """Returns those of these ids that were ever stored, delivered or not."""
        return set(await self._read(seqs_of, list(set(group_ids))))

    async def count_with_prefix(self, prefix: str) -> int:
        """Counts the groups ever stored whose id begins with `prefix`."""
        return await self._read(count_with_prefix, prefix)

    async def task_estimates(
        self, after: int, limit: int, *, env: str | None = None, split: Split | None = None
    ) -> list[EstimateRow]:
        """Returns up to `limit` estimates after number `after`, in the order in which tasks were
        first scored."""
        return await self._read(estimates_after, after, limit, env, split)

    async def estimates_of(
        self, env: str, split: Split, task_ids: Sequence[str]
    ) -> dict[str, Estimate]:
        """Returns the estimates by task id, for those of these tasks that were ever scored."""
        return await self._read(estimates_of, env, split, task_ids)

    async def made(self, group_ids: Sequence[str]) -> set[str]:
        """Returns those of these ids that were ever stored or counted as dropped."""
        async with self._reading() as connection:
            stored = await seqs_of(connection, group_ids)
            return {*stored, *await counted_drops(connection, group_ids)}

    async def count_made(self, prefix: str) -> int:
        """Counts the groups that were stored or counted as dropped, by the prefix of their ids."""
        async with self._reading() as connection:
            stored = await count_with_prefix(connection, prefix)
            return stored + await count_drops_with_prefix(connection, prefix)

    async def backlogs(self) -> dict[str, Backlog]:
        """Returns for each open run what waits for it, for how long, and what it has leased."""
        return await self._read(backlogs, self._writer.memory, self._clock())

    async def checkpoints(self, run: str) -> list[Checkpoint]:
        """Returns a run's checkpoints, oldest first."""
        return await self._read(list_checkpoints, run)

    async def get_run(self, name: str) -> Run:
        return await self._read(runs.get_run, name)

    async def list_runs(self) -> list[Run]:
        """Returns all runs, oldest first."""
        return await self._read(runs.list_runs)

    async def get_value(self, key: str) -> Any:
        """Returns the JSON-like value of `key`, or None if it was never set."""
        return await self._read(runs.get_value, key)

    async def values_with_prefix(self, prefix: str) -> dict[str, Any]:
        return await self._read(runs.values_with_prefix, prefix)

    async def minutes_between(self, start: int, end: int, step: int) -> list[tuple[int, str]]:
        """Returns every `step`-th minute from `start` to `end`, in order, with its numbers."""
        return list(await self._read(minutes_between, start, end, step))

    async def find_lease(self, lease_id: str) -> LeaseFacts:
        found = await self._read(facts_where, leases.c.lease_id == lease_id)
        if not found:
            raise NotFoundError(f"There is no lease {lease_id}.", lease_id=lease_id)
        return found[0]

    async def open_leases(self, run: str) -> list[LeaseFacts]:
        # A literal, because of the partial index; see groups.py.
        """Returns a run's open leases, soonest due first."""
        is_open = leases.c.state == literal_column("'open'")
        return await self._read(facts_where, is_open & (leases.c.run == run))

    async def leased_groups(self, run: str, limit: int) -> tuple[list[LeasedGroup], int]:
        """Returns up to `limit` groups in a run's open leases, oldest lease first, and how many
        there are."""
        async with self._reading() as connection:
            of = await runs.get_run(connection, run)
            queue = queue_of(of.name, of.delivery)
            found, count = await leased_rows(connection, run, queue, limit)
        now = self._clock()
        return [
            LeasedGroup(group_id, env, leased_at, now - leased_at, expires_at - now)
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
        memory = self._writer.memory
        return {
            name: memory.waiting(run) for name, run in memory.runs.items() if run.state == "open"
        }

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
        return any(UNKNOWN_VERSION < one < version for one in known)

    @property
    def open_runs(self) -> Mapping[str, KnownRun]:
        """The open runs by name, as of the last commit."""
        known = self._writer.memory.runs
        return {name: run for name, run in known.items() if run.state == "open"}

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
