"""The durable store as the place where the scheduler's groups go."""

from __future__ import annotations

import asyncio
import math

from ..records import Group, pack
from .rows import ATROPOS_RUN, GroupPut, Run
from .sql import Store

POLL_SECONDS = 0.1


class StoreSink:
    """Groups of our own environments on their way to trainers.

    Args:
        group_size: trajectories per group.
        most_groups: how many may wait for trainers before no further one is started.
        most_batches: the same in batches of those trainers that have said how large theirs are.
    """

    def __init__(
        self, store: Store, *, group_size: int, most_groups: int, most_batches: int
    ) -> None:
        self._store = store
        self._group_size = group_size
        self._most_groups = most_groups
        self._most_batches = most_batches

    async def put(self, group: Group) -> None:
        """Stores `group` durably.

        Raises:
            StoreError: it is not stored.
        """
        body = await asyncio.to_thread(pack, group)
        await self._store.put([put_of(group, body)])

    async def known(self, group_ids: list[str]) -> set[str]:
        """Those that were ever stored, delivered or not."""
        return await self._store.existing(group_ids)

    async def wait_for_room(self) -> None:
        """Returns when fewer groups wait than may."""
        while await self.room() <= 0:
            await asyncio.sleep(POLL_SECONDS)

    async def room(self) -> int:
        """Further groups that may wait for trainers; not positive where too many do."""
        return await self.most() - await self._queued()

    async def _queued(self) -> int:
        counts = await self._store.counts()
        return counts["queued"] + counts["buffered"]

    async def most(self) -> int:
        """Groups that may wait: at least two batches, so that one can be made while the other is
        fetched.
        """
        batch = sum(
            self._groups_per_batch(run)
            for run in await self._store.list_runs()
            if run.state == "open"
        )
        if not batch:
            return self._most_groups
        return max(2 * batch, min(self._most_groups, self._most_batches * batch))

    def _groups_per_batch(self, run: Run) -> int:
        """Over the Atropos wire a batch is counted in sequences."""
        if run.name != ATROPOS_RUN:
            return run.batch_size
        return math.ceil(run.batch_size / self._group_size)


def put_of(group: Group, body: bytes) -> GroupPut:
    """`group`, packed as `body`, for the store."""
    rows = [row for trajectory in group.trajectories for row in trajectory.sequences]
    return GroupPut(
        group_id=group.group_id,
        env=group.env,
        format="group",
        body=body,
        size=len(group.trajectories),
        tokens=sum(len(row.tokens) for row in rows),
        max_length=max((len(row.tokens) for row in rows), default=0),
        policy_version=group.policy_version,
    )
