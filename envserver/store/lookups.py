"""The lookups of a store that read the database. They change nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec
from envserver_records.errors import NotFoundError
from envserver_records.records import Split
from sqlalchemy import ColumnElement, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import Estimate
from . import estimates, groups, runs
from .backlog import Backlog, backlogs
from .checkpoints import list_checkpoints
from .damage import list_damaged
from .estimates import EstimateRow
from .history import minutes_between
from .listing import GroupQuery, Page, page_of
from .rewards import RewardCounts, reward_counts
from .rows import Checkpoint, DamagedGroup, GroupRow, Run
from .schema import deliveries, leases
from .states import LeaseState
from .tasks_seen import TaskOrder, TasksPage, seen_tasks
from .transaction import queue_of

if TYPE_CHECKING:
    from .writer import Writer

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
        return await self._read(estimates.estimates_after, after, limit, env, split)

    async def estimates_of(
        self, env: str, split: Split, task_ids: Sequence[str]
    ) -> dict[str, Estimate]:
        return await self._read(estimates.estimates_of, env, split, task_ids)

    async def made(self, group_ids: Sequence[str]) -> set[str]:
        async with self._reading() as connection:
            stored = await groups.seqs_of(connection, group_ids)
            return {*stored, *await estimates.counted_drops(connection, group_ids)}

    async def count_made(self, prefix: str) -> int:
        async with self._reading() as connection:
            stored = await groups.count_with_prefix(connection, prefix)
            return stored + await estimates.count_drops_with_prefix(connection, prefix)

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
