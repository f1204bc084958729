"""The durable store as the place where the scheduler's groups go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..records import Group, pack
from .rows import GroupPut
from .sql import Store

POLL_SECONDS = 0.1


class StoreSink:
    """Groups of our own environments on their way to trainers.

    Args:
        most_queued: how many groups may wait for a trainer before no further one is started.
    """

    def __init__(self, store: Store, most_queued: Callable[[], int]) -> None:
        self._store = store
        self._most_queued = most_queued

    async def put(self, group: Group) -> None:
        """Stores `group` durably.

        Raises:
            StoreError: it is not stored.
        """
        rows = [row for trajectory in group.trajectories for row in trajectory.sequences]
        await self._store.put(
            [
                GroupPut(
                    group_id=group.group_id,
                    env=group.env,
                    format="group",
                    body=pack(group),
                    size=len(group.trajectories),
                    tokens=sum(len(row.tokens) for row in rows),
                    max_length=max((len(row.tokens) for row in rows), default=0),
                    policy_version=group.policy_version,
                )
            ]
        )

    async def known(self, group_ids: list[str]) -> set[str]:
        """Those that were ever stored, delivered or not."""
        return await self._store.existing(group_ids)

    async def wait_for_room(self) -> None:
        """Returns when fewer groups wait than may."""
        while await self._queued() >= self._most_queued():
            await asyncio.sleep(POLL_SECONDS)

    async def _queued(self) -> int:
        counts = await self._store.counts()
        return counts["queued"] + counts["buffered"]
