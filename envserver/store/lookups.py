"""What the store tells of leases and of bodies as they lie in the database. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
from sqlalchemy import ColumnElement, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import NotFoundError
from . import groups
from .schema import leases
from .states import LeaseState


class LeaseFacts(msgspec.Struct, frozen=True):
    """A lease of any state, without its groups' rows."""

    lease_id: str
    run: str
    state: LeaseState
    expires_at: float
    group_ids: list[str]


class Lookups:
    """The part of a store that only looks."""

    def _reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        raise NotImplementedError

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
