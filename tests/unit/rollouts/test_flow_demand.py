"""Trainers' demand for groups, over a real store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE, until

from envserver.rollouts import Bounds
from envserver.store import Store, open_store
from envserver.store.demand import Demand, Staleness
from envserver.store.rows import ATROPOS_RUN, GroupPut

BOUNDS = Bounds(most_groups=4, most_batches=3)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "groups.db") as made:
        yield made


async def put(store: Store, *names: str, env: str = "a", version: int = 1) -> None:
    await store.put(
        [
            GroupPut(
                group_id=name,
                env=env,
                format="group",
                body=name.encode(),
                size=1,
                tokens=1,
                max_length=1,
                policy_version=version,
            )
            for name in names
        ]
    )


async def leased(store: Store, run: str, **more: Any) -> list[str]:
    lease = await store.lease(run, seconds=60, **more)
    if lease is None:
        return []
    await store.ack(lease.lease_id)
    return [group.group_id for group in lease.groups]


@asynccontextmanager
async def beside(work: Any) -> AsyncIterator[None]:
    """Runs `work` for as long as the body runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_whoever_waits_for_room_is_woken_by_what_makes_some(store: Store) -> None:
    demand = Demand(store, BOUNDS)
    await store.create_run("trainer", batch_size=2)
    await put(store, *"abcd")
    numbers = itertools.count()
    for make_capacity in (
        lambda: store.lease("trainer", max_groups=1, seconds=60),
        lambda: store.move(["b", "c"], "dropped"),
        lambda: store.set_run("trainer", batch_size=8),
    ):
        waiting = asyncio.create_task(demand.wait_for_capacity("a"))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await make_capacity()
        await asyncio.wait_for(waiting, PATIENCE)
        await put(store, *(str(next(numbers)) for _ in range(demand.free_capacity("a"))))
        assert demand.free_capacity("a") == 0


async def test_a_run_that_takes_nothing_yet_bounds_nothing(store: Store) -> None:
    demand = Demand(store, BOUNDS)
    await store.create_run(ATROPOS_RUN, batch_size=0)
    await put(store, "a")
    assert demand.free_capacity("a") == 3
    await store.set_run(ATROPOS_RUN, batch_size=4)
    assert demand.max_waiting() == demand.free_capacity("a") + 1 == 8


async def test_what_is_being_made_counts_where_it_would_grow_too_old(store: Store) -> None:
    demand = Demand(store, Bounds(most_groups=100, most_batches=9, max_staleness=1))
    await store.create_run("trainer", batch_size=2)
    assert demand.free_capacity("a") == 4
    demand.opened("a", 3)
    await put(store, "queued")
    assert (demand.free_capacity("a"), demand.capacity_if_idle("a")) == (0, 3)
    waiting = asyncio.create_task(demand.wait_for_capacity("a"))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    demand.opened("a", -1)
    await asyncio.wait_for(waiting, PATIENCE)


async def test_who_asks_for_more_than_it_said_gets_it_and_nobody_waits_for_ever(
    store: Store,
) -> None:
    demand = Demand(store, Bounds(most_groups=100, most_batches=1, max_staleness=0))
    await store.create_run("trainer", batch_size=2)
    await put(store, "a", "b")
    assert await store.lease("trainer", max_groups=2, seconds=60) is not None
    assert demand.free_capacity("a") == 0  # it trains these, and then publishes
    assert await store.lease("trainer", min_groups=5, seconds=60) is None
    await put(store, *(f"more {n}" for n in range(demand.free_capacity("a"))))
    assert await store.lease("trainer", min_groups=5, seconds=60) is not None
    assert demand.free_capacity("a") == 0


async def test_a_run_that_takes_some_environments_is_served_while_others_fill_the_queue(
    store: Store,
) -> None:
    demand = Demand(store, BOUNDS)
    await store.create_run("only a", batch_size=2, environments=["a"])
    await put(store, *(f"b{n}" for n in range(4)), env="b")
    assert demand.free_capacity("b") == 0
    assert demand.free_capacity("a") == 4
    await put(store, "a1", "a2")
    assert await leased(store, "only a", min_groups=2) == ["a1", "a2"]


async def test_a_broadcast_run_that_is_gone_is_closed_and_gets_all_when_it_is_back(
    store: Store,
) -> None:
    clock = Clock()
    demand = Demand(store, BOUNDS, silent_run_seconds=0.04, clock=clock)
    for name in ("gone", "here"):
        await store.create_run(name, batch_size=2, delivery="broadcast")
    await put(store, *"abcd")
    demand.run_activity()
    assert len(await leased(store, "here")) == 4
    assert demand.free_capacity("a") == 0  # of whoever is slowest
    clock.seconds = 1.0
    async with beside(demand.close_silent_runs()):
        await until(lambda: demand.closed_runs == {"gone": 1})
    assert demand.free_capacity("a") > 0
    assert set(store.open_runs) == {"here"}
    await put(store, *"efgh")
    assert len(await leased(store, "here")) == 4
    await store.create_run("gone", batch_size=2, delivery="broadcast")
    assert await leased(store, "gone") == list("abcdefgh")


async def test_a_run_that_holds_a_lease_or_has_nothing_to_take_is_not_silent(store: Store) -> None:
    clock = Clock()
    demand = Demand(store, BOUNDS, silent_run_seconds=10, clock=clock)
    for name in ("trains", "waits", "takes"):
        await store.create_run(
            name,
            batch_size=2,
            delivery="broadcast",
            environments=["b"] if name == "waits" else ["a"],
        )
    await put(store, *"abcd")
    await store.lease("trains", max_groups=2, seconds=600)
    for _ in range(3):
        demand.run_activity()
        clock.seconds += 100
        await leased(store, "takes", max_groups=1)
    assert {run.name for run in demand.run_activity() if run.silent_seconds >= 10} == set()


async def test_nothing_too_old_is_leased_from_the_moment_a_version_is_published(
    store: Store,
) -> None:
    staleness = Staleness(store, 1)
    await store.create_run("trainer", batch_size=2)
    await put(store, "old", version=1)
    await put(store, "young", version=3)
    await put(store, "foreign", version=-1)
    held = await store.lease("trainer", max_groups=1, seconds=60)
    assert held is not None
    staleness.publish(3)
    async with beside(staleness.run()):
        await store.nack(held.lease_id)  # it comes back too old
        assert await leased(store, "trainer", max_groups=1) == ["young"]
        await until(lambda: staleness.dropped == 1)
        await put(store, "late", version=1)  # published while it was on its way
        await until(lambda: staleness.dropped == 2)
    assert (await store.counts())["dropped"] == 2
    assert await leased(store, "trainer") == ["foreign"]


async def test_without_a_bound_nothing_is_dropped(store: Store) -> None:
    staleness = Staleness(store, None)
    await store.create_run("trainer", batch_size=2)
    await put(store, "old", version=1)
    staleness.publish(99)
    await staleness.run()
    assert await leased(store, "trainer") == ["old"]
