"""What the store reads from the database for those who only look. Changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from envserver_records.errors import NotFoundError
from envserver_records.records import Split
from sqlalchemy import ColumnElement, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import Estimate
from . import estimates, groups, runs
from .checkpoints import list_checkpoints
from .damage import list_damaged
from .estimates import EstimateRow
from .rows import Checkpoint, DamagedGroup, GroupRow, Run
from .schema import leases
from .states import LeaseState


class LeaseFacts(msgspec.Struct, frozen=True):
    """A lease of any state, without its groups' rows."""

    lease_id: str
    run: str
    state: LeaseState
    expires_at: float
    group_ids: list[str]


class DatabaseLookups(ABC):
    """The part of a store that only looks."""

    @abstractmethod
    def _reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection that sees what is durable."""

    async def pending(self) -> list[GroupRow]:
        """Queued and buffered groups, oldest first."""
        async with self._reading() as connection:
            return await groups.pending(connection)

    async def arrived_after(self, seq: int, limit: int) -> list[GroupRow]:
        """Up to `limit` kept groups of any state behind number `seq`, oldest first; takes none."""
        async with self._reading() as connection:
            return await groups.arrived_after(connection, seq, limit)

    async def damaged(self, limit: int) -> list[DamagedGroup]:
        """Up to `limit` groups whose bodies were found damaged, the last that were found first."""
        async with self._reading() as connection:
            return await list_damaged(connection, limit)

    async def rows(self, group_ids: Sequence[str]) -> list[GroupRow]:
        """What is known of these groups, in this order, each once.

        Raises:
            NotFoundError: one does not exist, or is no longer kept.
        """
        async with self._reading() as connection:
            return await groups.rows_of(connection, group_ids)

    async def existing(self, group_ids: Sequence[str]) -> set[str]:
        """Those of these ids that were ever stored, whatever became of them."""
        async with self._reading() as connection:
            return set(await groups.seqs_of(connection, list(set(group_ids))))

    async def count_with_prefix(self, prefix: str) -> int:
        """How many groups whose id begins with `prefix` were ever stored."""
        async with self._reading() as connection:
            return await groups.count_with_prefix(connection, prefix)

    async def task_estimates(
        self, after: int, limit: int, *, env: str | None = None, split: Split | None = None
    ) -> list[EstimateRow]:
        """Up to `limit` estimates behind number `after`, in the order in which tasks were first
        scored; `env`, `split`: only of these."""
        async with self._reading() as connection:
            return await estimates.estimates_after(connection, after, limit, env, split)

    async def estimates_of(
        self, env: str, split: Split, task_ids: Sequence[str]
    ) -> dict[str, Estimate]:
        """By task, those of these tasks that were ever scored."""
        async with self._reading() as connection:
            return await estimates.estimates_of(connection, env, split, task_ids)

    async def made(self, group_ids: Sequence[str]) -> set[str]:
        """Those of these ids that were ever stored, or counted as dropped."""
        async with self._reading() as connection:
            stored = await groups.seqs_of(connection, group_ids)
            return {*stored, *await estimates.counted_drops(connection, group_ids)}

    async def count_made(self, prefix: str) -> int:
        """How many groups whose id begins with `prefix` were stored, or counted as dropped."""
        async with self._reading() as connection:
            stored = await groups.count_with_prefix(connection, prefix)
            return stored + await estimates.count_drops_with_prefix(connection, prefix)

    async def checkpoints(self, run: str) -> list[Checkpoint]:
        """Those of a run, oldest first. Raises NotFoundError: no such run."""
        async with self._reading() as connection:
            return await list_checkpoints(connection, run)

    async def get_run(self, name: str) -> Run:
        """Raises NotFoundError: there is none."""
        async with self._reading() as connection:
            return await runs.get_run(connection, name)

    async def list_runs(self) -> list[Run]:
        """All runs, oldest first."""
        async with self._reading() as connection:
            return await runs.list_runs(connection)

    async def get_value(self, key: str) -> Any:
        """The JSON-like value of `key`; None when it was never set."""
        async with self._reading() as connection:
            return await runs.get_value(connection, key)

    async def find_lease(self, lease_id: str) -> LeaseFacts:
        """Raises NotFoundError: there is none."""
        async with self._reading() as connection:
            found = await facts_where(connection, leases.c.lease_id == lease_id)
        if not found:
            raise NotFoundError(f"There is no lease {lease_id}.", lease_id=lease_id)
        return found[0]

    async def open_leases(self, run: str) -> list[LeaseFacts]:
        """The open leases of a run, soonest due first."""
        # Written out for the partial index, as in groups.
        is_open = leases.c.state == literal_column("'open'")
        async with self._reading() as connection:
            return await facts_where(connection, is_open & (leases.c.run == run))

    async def stored_bodies(self, group_ids: Sequence[str]) -> list[tuple[int, bytes]]:
        """The bodies of these groups, in this order, as `compression.encode` made them.

        Raises:
            NotFoundError: one does not exist, or is no longer kept.
        """
        async with self._reading() as connection:
            return await groups.stored_bodies(connection, group_ids)


async def facts_where(
    connection: AsyncConnection, condition: ColumnElement[bool]
) -> list[LeaseFacts]:
    """The leases of which `condition` is true, soonest due first."""
    columns = (leases.c.lease_id, leases.c.run, leases.c.state, leases.c.expires_at)
    query = select(*columns, leases.c.group_ids).where(condition).order_by(leases.c.expires_at)
    return [
        LeaseFacts(*row[:4], msgspec.json.decode(row.group_ids, type=list[str]))
        for row in await connection.execute(query)
    ]
