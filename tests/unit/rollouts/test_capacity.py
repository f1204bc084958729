"""When further groups may start: what waits is bounded, nothing waits for ever; in a store, too."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.stores import group
from support.waiting import PATIENCE, settled, until

from envserver.rollouts.policy import (
    SHARED,
    Bounds,
    Depth,
    Taker,
    free_capacity,
    is_stale,
    most_waiting,
    oldest_deliverable,
)
from envserver.rollouts.scheduler import Share, Shares, targets
from envserver.running.stopping import beside
from envserver.store import Store, open_store
from envserver.store.demand import Demand, Staleness

ENVS = ("a", "b", "c")
MOST_OPEN = 6


def taker(name: str = "t", batch: int = 4, *environments: str, own: bool = False) -> Taker:
    queue = name if own else SHARED
    return Taker(name=name, queue=queue, batch=batch, environments=frozenset(environments))


@dataclass
class Trainer:
    """A run that leases whole batches, trains one and acknowledges it, which may publish."""

    taker: Taker
    publishes: bool
    leased: Counter[str] = field(default_factory=Counter)
    steps: int = 0


@dataclass
class World:
    """Environments, queues and trainers, without a server: what is decided is decided for real."""

    trainers: list[Trainer]
    filters: set[str]
    bounds: Bounds
    shares: Shares
    version: int = 0
    open: list[tuple[str, int]] = field(default_factory=list)
    queues: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    received: list[int] = field(default_factory=list)
    """How far behind each group was when a trainer got it."""

    @property
    def takers(self) -> list[Taker]:
        return [one.taker for one in self.trainers]

    def depths(self) -> dict[str, dict[str, Depth]]:
        found = {}
        for name, groups in self.queues.items():
            queued = Counter(env for env, _ in groups)
            leased = sum((t.leased for t in self.trainers if t.taker.queue == name), Counter())
            found[name] = {env: Depth(queued[env], leased[env]) for env in {*queued, *leased}}
        return found

    def begin(self) -> bool:
        """The next group of whose turn it is among those that have room."""
        made = Counter(env for env, _ in self.open)
        waiting = self.depths()
        asking = [e for e in ENVS if free_capacity(e, self.takers, waiting, made, self.bounds) > 0]
        if not asking or len(self.open) >= MOST_OPEN:
            return False
        env = self.shares.next(asking)
        self.shares.begin(env)
        self.open.append((env, self.version))
        return True

    def finish(self, which: int) -> bool:
        if not self.open:
            return False
        env, version = self.open.pop(which % len(self.open))
        if env not in self.filters and not is_stale(
            version, self.version, self.bounds.max_staleness
        ):
            for queue in {one.queue for one in self.takers if one.takes(env)} or {SHARED}:
                self.queues.setdefault(queue, []).append((env, version))
        return True

    def train(self, which: int) -> bool:
        """A trainer takes a step: what it has is acknowledged, then it leases a batch."""
        one = self.trainers[which % len(self.trainers)]
        if one.leased:
            one.leased.clear()
            one.steps += 1
            if one.publishes:
                self.publish()
            return True
        queue = self.queues.get(one.taker.queue, [])
        fit = [group for group in queue if one.taker.takes(group[0])][: one.taker.batch]
        if len(fit) < one.taker.batch:
            return False
        for made in fit:
            queue.remove(made)
            one.leased[made[0]] += 1
            self.received.append(self.version - made[1])
        return True

    def publish(self) -> None:
        self.version += 1
        oldest = oldest_deliverable(self.version, self.bounds.max_staleness)
        for groups in self.queues.values():
            groups[:] = [group for group in groups if group[1] >= oldest]


def taken_for_sure(world: World) -> bool:
    """Whether each run takes an environment that delivers."""
    return all(any(one.takes(e) and e not in world.filters for e in ENVS) for one in world.takers)


FILTERS = st.sets(st.sampled_from(ENVS), max_size=2)
EVENTS = st.lists(st.tuples(st.sampled_from("bbfft"), st.integers(0, 9)), max_size=60)
TAKEN = st.sampled_from([(), (), ("a",), ("b",), ("a", "b"), ("b", "c")])
TRAINERS = st.lists(
    st.tuples(st.integers(1, 4), TAKEN, st.booleans(), st.booleans()), min_size=1, max_size=3
)


@settings(max_examples=examples(60))
@given(
    TRAINERS,
    FILTERS,
    st.none() | st.integers(0, 2),
    st.lists(st.tuples(st.floats(1, 3), st.floats(0, 0.3)), min_size=3, max_size=3),
    EVENTS,
)
def test_whatever_happens_queues_are_bounded_and_every_trainer_gets_on(
    runs: list[tuple[int, tuple[str, ...], bool, bool]],
    filters: set[str],
    most: int | None,
    mix: list[tuple[float, float]],
    events: list[tuple[str, int]],
) -> None:
    trainers = [
        Trainer(taker(f"t{n}", batch, *taken, own=own), publishes)
        for n, (batch, taken, own, publishes) in enumerate(runs)
    ]
    bounds = Bounds(most_groups=9, most_batches=3, max_staleness=most)
    shares = Shares(targets(Share(e, *one) for e, one in zip(ENVS, mix, strict=True)))
    world = World(trainers, filters, bounds, shares)
    for kind, which in events:
        step(world, kind, which)
        check_bounds(world)
    if (most is not None and len(trainers) > 1) or not taken_for_sure(world):
        return  # several that publish at once may make each other's groups too old for ever
    before = {one.taker.name: one.steps for one in trainers}
    go_on(world, "bbbfff" + "t" * len(trainers))
    for one in trainers:
        rivals = [other for other in trainers if are_rivals(one.taker, other.taker)]
        assert any(other.steps > before[other.taker.name] for other in rivals), (one, world)


def are_rivals(one: Taker, other: Taker) -> bool:
    """Whether a group that one of them takes may be one that the other waited for."""
    both = any(one.takes(env) and other.takes(env) for env in ENVS)
    return one.queue == other.queue and both


def step(world: World, kind: str, which: int) -> None:
    {"b": lambda _: world.begin(), "f": world.finish, "t": world.train}[kind](which)


def go_on(world: World, kinds: str) -> None:
    """Everybody does what it can, in turn."""
    for turn in range(40):
        for kind in kinds:
            step(world, kind, turn)
        check_bounds(world)


def check_bounds(world: World) -> None:
    most = sum(most_waiting(one.taker.batch, world.bounds) for one in world.trainers)
    for name, queue in world.queues.items():
        assert len(queue) <= most + world.bounds.most_groups + MOST_OPEN + len(ENVS), name
    if world.bounds.max_staleness is not None:
        assert all(behind <= world.bounds.max_staleness for behind in world.received)


FEW = Bounds(most_groups=4, most_batches=3)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "groups.db") as made:
        yield made


async def put(store: Store, *names: str, env: str = "a", version: int = 1) -> None:
    await store.put([group(name, env=env, policy_version=version) for name in names])


async def leased(store: Store, run: str, **more: Any) -> list[str]:
    lease = await store.lease(run, seconds=60, **more)
    if lease is None:
        return []
    await store.ack(lease.lease_id)
    return [group.group_id for group in lease.groups]


async def test_what_is_being_made_counts_where_it_would_grow_too_old(store: Store) -> None:
    demand = Demand(store, Bounds(most_groups=100, most_batches=9, max_staleness=1))
    await store.create_run("trainer", batch_size=2)
    assert demand.free_capacity("a") == 4
    demand.opened("a", 3)
    await put(store, "queued")
    assert (demand.free_capacity("a"), demand.capacity_if_idle("a")) == (0, 3)
    waiting = asyncio.create_task(demand.wait_for_capacity("a"))
    await settled()
    assert not waiting.done()
    demand.opened("a", -1)
    await asyncio.wait_for(waiting, PATIENCE)


async def test_who_asks_for_more_than_it_said_gets_it_and_nobody_starves(store: Store) -> None:
    demand = Demand(store, Bounds(most_groups=100, most_batches=1, max_staleness=0))
    await store.create_run("trainer", batch_size=2)
    await put(store, "a", "b")
    assert await store.lease("trainer", max_groups=2, seconds=60) is not None
    assert demand.free_capacity("a") == 0  # it trains these, and then publishes
    assert await store.lease("trainer", min_groups=5, seconds=60) is None
    await put(store, *(f"more {n}" for n in range(demand.free_capacity("a"))))
    assert await store.lease("trainer", min_groups=5, seconds=60) is not None
    assert demand.free_capacity("a") == 0


async def test_a_broadcast_run_that_left_is_closed_and_gets_all_later(store: Store) -> None:
    now = [0.0]
    demand = Demand(store, FEW, silent_run_seconds=0.04, clock=lambda: now[0])
    for name in ("gone", "here"):
        await store.create_run(name, batch_size=2, delivery="broadcast")
    await put(store, *"abcd")
    demand.run_activity()
    assert len(await leased(store, "here")) == 4
    assert demand.free_capacity("a") == 0  # of whoever is slowest
    now[0] = 1.0
    async with beside("silent", demand.close_silent_runs()):
        await until(lambda: demand.closed_runs == {"gone": 1})
    assert demand.free_capacity("a") > 0
    assert set(store.open_runs) == {"here"}
    await put(store, *"efgh")
    assert len(await leased(store, "here")) == 4
    await store.create_run("gone", batch_size=2, delivery="broadcast")
    assert await leased(store, "gone") == list("abcdefgh")


async def test_a_run_that_holds_a_lease_or_has_nothing_to_take_is_not_silent(store: Store) -> None:
    now = [0.0]
    demand = Demand(store, FEW, silent_run_seconds=10, clock=lambda: now[0])
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
        now[0] += 100
        await leased(store, "takes", max_groups=1)
    assert {run.name for run in demand.run_activity() if run.silent_seconds >= 10} == set()


async def test_nothing_too_old_is_leased_once_a_version_is_published(store: Store) -> None:
    staleness = Staleness(store, 1)
    await store.create_run("trainer", batch_size=2)
    await put(store, "old", version=1)
    await put(store, "young", version=3)
    await put(store, "foreign", version=-1)
    held = await store.lease("trainer", max_groups=1, seconds=60)
    assert held is not None
    staleness.publish(3)
    async with beside("stale", staleness.run()):
        await store.nack(held.lease_id)  # it comes back too old
        assert await leased(store, "trainer", max_groups=1) == ["young"]
        await until(lambda: staleness.dropped == 1)
        await put(store, "late", version=1)  # published while it was on its way
        await until(lambda: staleness.dropped == 2)
    assert (await store.counts())["dropped"] == 2
    assert await leased(store, "trainer") == ["foreign"]
