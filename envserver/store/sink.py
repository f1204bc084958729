"""Stores the groups that the scheduler makes."""

from __future__ import annotations

import asyncio

import msgspec
from envserver_records.records import Group, pack

from ..rollouts.estimates import Scored, scored_of
from .demand import Demand
from .facts import facts_of
from .interface import GroupStore
from .rows import GroupPut


class StoreSink:
    """Stores the groups of one environment of this server for trainers.

    Args:
        env: name of the environment.
        demand: the demand of all environments of this server.
    """

    def __init__(self, store: GroupStore, env: str, demand: Demand) -> None:
        self._store = store
        self._env = env
        self._demand = demand

    async def put(self, group: Group) -> None:
        """Stores `group` durably. Raises StoreError: it was not stored."""
        body = await asyncio.to_thread(pack, group)
        await self._store.put([put_of(group, body)])

    async def dropped(self, scored: Scored) -> None:
        """Counts a group that was scored and is not stored, in the estimate of its task.
        Raises StoreError: it may not have been counted.
        """
        await self._store.count_dropped([scored])

    async def known(self, group_ids: list[str]) -> set[str]:
        """Returns those of these ids that were ever stored, delivered or not."""
        return await self._store.existing(group_ids)

    async def wait_for_capacity(self) -> None:
        """Waits until another group may be started."""
        await self._demand.wait_for_capacity(self._env)

    def opened(self, groups: int) -> None:
        """Adds `groups` (may be negative) to the number of groups being made."""
        self._demand.opened(self._env, groups)


class StoreOrderSink:
    """Stores the groups of orders (`rollouts.ordered.GroupSink`).

    No run ever leases them: a client fetches them by id. Retention keeps them as long as
    delivered groups.
    """

    def __init__(self, store: GroupStore) -> None:
        self._store = store

    async def put(self, group: Group) -> None:
        """Stores `group` durably. Raises StoreError if it is not stored."""
        body = await asyncio.to_thread(pack, group)
        put = msgspec.structs.replace(put_of(group, body), state="dropped")
        await self._store.put([put])

    async def known(self, group_ids: list[str]) -> set[str]:
        """Returns those of these ids that were ever stored."""
        return await self._store.existing(group_ids)


def put_of(group: Group, body: bytes) -> GroupPut:
    """Returns the record that stores `group`, whose packed form is `body`."""
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
        scored=scored_of(group),
        facts=facts_of(group),
    )
