"""The durable store as the place where groups wait for whoever ordered them.

No run ever leases them: they are known by their ids. They are kept as long as what was delivered.
"""

from __future__ import annotations

import asyncio

import msgspec
from envserver_records.records import Group, pack

from .sink import put_of
from .sql import Store


class StoreShelf:
    """See `rollouts.ordered.Shelf`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, group: Group) -> None:
        """Stores `group` durably. Raises StoreError: it is not stored."""
        body = await asyncio.to_thread(pack, group)
        put = msgspec.structs.replace(put_of(group, body), state="dropped")
        await self._store.put([put])

    async def known(self, group_ids: list[str]) -> set[str]:
        """Those that were ever stored."""
        return await self._store.existing(group_ids)
