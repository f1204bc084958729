"""Computes how many groups may be open, from what trainers take.

In: the queues and the open runs, from memory, and the number of groups being made. Out: how many
more may be started (`rollouts.policy` has the rules), and which silent runs are closed because they
block others. Nothing polls."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

import msgspec
import structlog
from envserver_records.errors import StoreError
from envserver_records.records import Group, pack
from envserver_records.waiting import cancel_and_wait

from ..rollouts.estimates import Scored, scored_of
from ..rollouts.policy import (
    SHARED,
    Bounds,
    Depth,
    RunActivity,
    Taker,
    free_capacity,
    most_waiting,
    oldest_deliverable,
    silent_runs,
)
from .packed import facts_of
from .rows import ATROPOS_RUN, Changes, GroupPut
from .sql import Store
from .transaction import KnownRun

log = structlog.get_logger(__name__)

_LONGEST_PAUSE_SECONDS = 60.0
_PAUSE_AFTER_FAILURE_SECONDS = 1.0


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_and_wait(*tasks)


class Staleness:
    """Drops groups that are too old for the published policy version before they are leased."""

    def __init__(self, store: Store, max_staleness: int | None) -> None:
        self._store = store
        self._most = max_staleness
        self._published = Changes()
        self.dropped = 0
        """Groups dropped from queues since the start, counted once per queue."""

    def publish(self, version: int) -> None:
        self._store.oldest_version = oldest_deliverable(version, self._most)
        self._published.announce(self._published.number + 1)

    async def run(self) -> None:
        """Drops groups that are too old until cancelled; tries again after a StoreError."""
        while self._most is not None:
            published, seen = self._published.number, self._store.changes
            oldest = self._store.oldest_version
            try:
                if self._store.may_hold_older(oldest):
                    self.dropped += await self._store.drop_stale(oldest)
                await _first(
                    self._published.wait(published, None),
                    self._store.wait_for_change(None, since=seen),
                )
            except StoreError as error:
                log.error("stale_groups.not_dropped", error=str(error))
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)


class Demand:
    """The demand for groups, shared by all environments of a server.

    Args:
        smallest_group: trajectories in the smallest group that any environment delivers.
        silent_run_seconds: see `RolloutsConfig`; None: no run is ever closed.
    """

    def __init__(
        self,
        store: Store,
        bounds: Bounds,
        *,
        smallest_group: int = 1,
        silent_run_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._bounds = bounds
        self._smallest_group = smallest_group
        self._silent_run_seconds = silent_run_seconds
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._changes = Changes()
        self._moved: dict[str, tuple[int, float]] = {}
        self.closed_runs: Counter[str] = Counter()
        """Number of times each run was closed because it was silent."""

    def opened(self, env: str, groups: int) -> None:
        """Adds `groups` (may be negative) to the number of groups being made."""
        self._open[env] += groups
        self._changes.announce(self._changes.number + 1)

    def free_capacity(self, env: str) -> int:
        """Returns how many groups may be started now; 0 or less: none."""
        return free_capacity(env, self._takers(), self._depths(), self._open, self._bounds)

    def capacity_if_idle(self, env: str) -> int:
        """Like `free_capacity`, as if no group were being made."""
        return free_capacity(env, self._takers(), self._depths(), {}, self._bounds)

    def max_waiting(self) -> int:
        """Returns how many groups may wait in the shared queue."""
        batch = sum(taker.batch for taker in self._takers() if taker.queue == SHARED)
        return most_waiting(batch, self._bounds) if batch else self._bounds.most_groups

    async def wait_for_capacity(self, env: str) -> None:
        while True:
            ours, theirs = self._changes.number, self._store.activity
            if self.free_capacity(env) > 0:
                return
            await _first(
                self._changes.wait(ours, None), self._store.wait_for_activity(None, since=theirs)
            )

    async def close_silent_runs(self) -> None:
        """Closes silent runs that block others, until cancelled."""
        if self._silent_run_seconds is None:
            return
        pause = min(_LONGEST_PAUSE_SECONDS, self._silent_run_seconds / 4)
        while True:
            for name in silent_runs(self.run_activity(), self._silent_run_seconds):
                try:
                    await self._store.close_run(name)
                except StoreError as error:
                    log.error("silent_run.not_closed", run=name, error=str(error))
                    continue
                self.closed_runs[name] += 1
                log.warning("silent_run.closed", run=name, seconds=self._silent_run_seconds)
            await asyncio.sleep(pause)

    def smallest_batch(self) -> int:
        """Returns how many groups the least demanding open run takes at a time; 0: no run."""
        return min((taker.batch for taker in self._takers()), default=0)

    def run_activity(self) -> list[RunActivity]:
        """Returns the open runs, and since when each has left waiting groups untaken."""
        now = self._clock()
        before, self._moved = self._moved, {}
        found = []
        for name, run in self._store.open_runs.items():
            queued, leased, done = (
                self._store.count_of(run, state) for state in ("queued", "leased", "acked")
            )
            known, since = before.get(name, (-1, now))
            if leased or not queued or done != known:
                since = now
            self._moved[name] = (done, since)
            is_broadcast = run.delivery == "broadcast"
            found.append(
                RunActivity(name=name, is_broadcast=is_broadcast, silent_seconds=now - since)
            )
        return found

    def _depths(self) -> dict[str, dict[str, Depth]]:
        found: dict[str, dict[str, Depth]] = {}
        for (queue, env, state), count in self._store.tallies.items():
            if not count or state not in ("queued", "buffered", "leased"):
                continue
            of_queue = found.setdefault(queue, {})
            known = of_queue.get(env, Depth())
            more = (0, count) if state == "leased" else (count, 0)
            of_queue[env] = Depth(known.queued + more[0], known.leased + more[1])
        return found

    def _takers(self) -> list[Taker]:
        runs: Mapping[str, KnownRun] = self._store.open_runs
        return [
            Taker(
                name=name,
                queue=run.queue,
                batch=self._groups_per_batch(name, run),
                environments=run.environments,
                is_hungry=self._store.hungry_for(name) > 0,
            )
            for name, run in runs.items()
            if run.batch_size  # no trainer has registered over the Atropos API yet
        ]

    def _groups_per_batch(self, name: str, run: KnownRun) -> int:
        """Returns the larger of the run's `batch_size` and the `min_groups` that it waits for. On
        the Atropos API `batch_size` counts sequences: returns enough of the smallest groups."""
        if name != ATROPOS_RUN:
            return max(run.batch_size, self._store.hungry_for(name))
        return math.ceil(run.batch_size / self._smallest_group)


class StoreOrderSink:
    """Stores the groups of orders (`rollouts.events.OrderSink`): clients fetch them by id, no run
    leases them, and retention keeps them as long as delivered groups."""

    _state: Literal["queued", "dropped"] = "dropped"

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, group: Group) -> None:
        put = put_of(group, await asyncio.to_thread(pack, group))
        await self._store.put([msgspec.structs.replace(put, state=self._state)])

    async def known(self, group_ids: list[str]) -> set[str]:
        return await self._store.existing(group_ids)


class StoreSink(StoreOrderSink):
    """Stores the groups of one environment of this server for trainers."""

    _state = "queued"

    def __init__(self, store: Store, env: str, demand: Demand) -> None:
        super().__init__(store)
        self._env = env
        self._demand = demand

    async def dropped(self, scored: Scored) -> None:
        await self._store.count_dropped([scored])

    async def wait_for_capacity(self) -> None:
        await self._demand.wait_for_capacity(self._env)

    def opened(self, groups: int) -> None:
        self._demand.opened(self._env, groups)


def put_of(group: Group, body: bytes) -> GroupPut:
    rows = [row for trajectory in group.trajectories for row in trajectory.sequences]
    return GroupPut(
        group_id=group.group_id,
        env=group.env,
        format="group" if all(row.share == 1 for row in rows) else "group-shares",
        body=body,
        size=len(group.trajectories),
        tokens=sum(len(row.tokens) for row in rows),
        max_length=max((len(row.tokens) for row in rows), default=0),
        policy_version=group.policy_version,
        scored=scored_of(group),
        facts=facts_of(group),
    )
