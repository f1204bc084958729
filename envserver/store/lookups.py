"""The lookups of a store that read the database. They change nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec
from envserver_records.errors import NotFoundError
from envserver_records.records import Split
from sqlalchemy import ColumnElement, Integer, case, cast, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import Estimate
from . import groups, runs
from .damage import list_damaged
from .deliveries import Backlog, backlogs
from .groups import EstimateRow
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
from .rows import Checkpoint, DamagedGroup, GroupRow, Run
from .runs import list_checkpoints, minutes_between
from .schema import deliveries, group_facts, leases
from .states import LeaseState
from .transaction import queue_of

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
    """Counts the groups that `query` matches, in two passes over their facts."""
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


class LeaseFacts(msgspec.Struct, frozen=True):
    """A lease in any state, without its groups' rows."""

    lease_id: str
    run: str
    state: LeaseState
    expires_at: float
    group_ids: list[str]


class LeasedGroup(msgspec.Struct, frozen=True):
    """A group in an open lease. Times are seconds since 1970; ages are by the store's clock."""

    group_id: str
    environment: str
    leased_at: float
    age_seconds: float
    expires_in_seconds: float


class GroupLookups(ABC):
    """Reads groups from a database with the tables of a store; see `interface.ReadGroups`."""

    @abstractmethod
    def _reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Opens a connection that sees what is durable."""

    async def _read(
        self,
        query: Callable[Concatenate[AsyncConnection, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        async with self._reading() as connection:
            return await query(connection, *args, **kwargs)

    async def list_groups(self, query: GroupQuery, cursor: str, limit: int) -> Page:
        return await self._read(page_of, query, cursor, limit)

    async def seen_tasks(
        self, order: TaskOrder, cursor: str, limit: int, *, environment: str = "", text: str = ""
    ) -> TasksPage:
        return await self._read(
            seen_tasks, order, cursor, limit, environment=environment, text=text
        )

    async def reward_counts(self, query: GroupQuery) -> RewardCounts:
        return await self._read(reward_counts, query)

    async def rows(self, group_ids: Sequence[str]) -> list[GroupRow]:
        return await self._read(groups.rows_of, group_ids)

    async def stored_bodies(self, group_ids: Sequence[str]) -> list[tuple[int, bytes]]:
        return await self._read(groups.stored_bodies, group_ids)


class DatabaseLookups(GroupLookups):
    """The part of `interface.LookUp` that queries the database."""

    _writer: Writer
    _clock: Callable[[], float]

    async def pending(self) -> list[GroupRow]:
        return await self._read(groups.pending)

    async def most_waiting_bytes(self) -> int:
        of = deliveries.c
        where = (of.queue.in_(sorted(self._writer.memory.drawn_from())), of.settled_at.is_(None))
        query = select(func.sum(of.stored_bytes)).where(*where).group_by(of.queue)
        async with self._reading() as connection:
            return max((int(size) for size in await connection.scalars(query)), default=0)

    async def damaged(self, limit: int) -> list[DamagedGroup]:
        return await self._read(list_damaged, limit)

    async def existing(self, group_ids: Sequence[str]) -> set[str]:
        return set(await self._read(groups.seqs_of, list(set(group_ids))))

    async def count_with_prefix(self, prefix: str) -> int:
        return await self._read(groups.count_with_prefix, prefix)

    async def task_estimates(
        self, after: int, limit: int, *, env: str | None = None, split: Split | None = None
    ) -> list[EstimateRow]:
        return await self._read(groups.estimates_after, after, limit, env, split)

    async def estimates_of(
        self, env: str, split: Split, task_ids: Sequence[str]
    ) -> dict[str, Estimate]:
        return await self._read(groups.estimates_of, env, split, task_ids)

    async def made(self, group_ids: Sequence[str]) -> set[str]:
        async with self._reading() as connection:
            stored = await groups.seqs_of(connection, group_ids)
            return {*stored, *await groups.counted_drops(connection, group_ids)}

    async def count_made(self, prefix: str) -> int:
        async with self._reading() as connection:
            stored = await groups.count_with_prefix(connection, prefix)
            return stored + await groups.count_drops_with_prefix(connection, prefix)

    async def backlogs(self) -> dict[str, Backlog]:
        return await self._read(backlogs, self._writer.memory, self._clock())

    async def checkpoints(self, run: str) -> list[Checkpoint]:
        return await self._read(list_checkpoints, run)

    async def get_run(self, name: str) -> Run:
        return await self._read(runs.get_run, name)

    async def list_runs(self) -> list[Run]:
        return await self._read(runs.list_runs)

    async def get_value(self, key: str) -> Any:
        return await self._read(runs.get_value, key)

    async def values_with_prefix(self, prefix: str) -> dict[str, Any]:
        return await self._read(runs.values_with_prefix, prefix)

    async def minutes_between(self, start: int, end: int, step: int) -> list[tuple[int, str]]:
        return list(await self._read(minutes_between, start, end, step))

    async def find_lease(self, lease_id: str) -> LeaseFacts:
        found = await self._read(facts_where, leases.c.lease_id == lease_id)
        if not found:
            raise NotFoundError(f"There is no lease {lease_id}.", lease_id=lease_id)
        return found[0]

    async def open_leases(self, run: str) -> list[LeaseFacts]:
        # A literal, because of the partial index; see groups.py.
        is_open = leases.c.state == literal_column("'open'")
        return await self._read(facts_where, is_open & (leases.c.run == run))

    async def leased_groups(self, run: str, limit: int) -> tuple[list[LeasedGroup], int]:
        async with self._reading() as connection:
            of = await runs.get_run(connection, run)
            queue = queue_of(of.name, of.delivery)
            found, count = await leased_rows(connection, run, queue, limit)
        now = self._clock()
        return [
            LeasedGroup(group_id, env, leased_at, now - leased_at, expires_at - now)
            for group_id, env, leased_at, expires_at in found
        ], count


async def leased_rows(
    connection: AsyncConnection, run: str, queue: str, limit: int
) -> tuple[Sequence[Any], int]:
    """Returns (group id, environment, leased at, expires at) of `limit` leased groups of a run,
    oldest lease first, and the number of all.
    """
    # A literal, because of the partial index; see groups.py.
    is_open = leases.c.state == literal_column("'open'")
    columns = (leases.c.lease_id, leases.c.group_ids, leases.c.created_at, leases.c.expires_at)
    query = select(*columns).where(is_open & (leases.c.run == run)).order_by(leases.c.created_at)
    named = [
        (group_id, row.created_at, row.expires_at)
        for row in await connection.execute(query)
        for group_id in msgspec.json.decode(row.group_ids, type=list[str])
    ]
    shown = named[:limit]
    rows = await groups.kept_rows(connection, [one[0] for one in shown], queue)
    return [(name, rows[name].env, *times) for name, *times in shown if name in rows], len(named)


async def facts_where(
    connection: AsyncConnection, condition: ColumnElement[bool]
) -> list[LeaseFacts]:
    """Returns the leases that match `condition`, soonest due first."""
    columns = (leases.c.lease_id, leases.c.run, leases.c.state, leases.c.expires_at)
    query = select(*columns, leases.c.group_ids).where(condition).order_by(leases.c.expires_at)
    return [
        LeaseFacts(*row[:4], msgspec.json.decode(row.group_ids, type=list[str]))
        for row in await connection.execute(query)
    ]
