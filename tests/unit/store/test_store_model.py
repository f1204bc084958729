"""The store against a simple model: any sequence of calls gives the same answers."""

import asyncio
import contextlib
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import UsageError
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.postgres import Postgres
from support.store_model import SHARED, Group, Model
from support.stores import group

from envserver.store import Delivery, Run, Store, deliveries, open_store
from envserver.store.database import SteadyClock

MEMORY = Path("/dev/shm")
"""Durability is tested elsewhere."""
NAMES = [f"group-{index}" for index in range(16)]
STATES = ["buffered", "queued", "leased", "acked", "dropped"]
RUNS: dict[str, tuple[Delivery, list[str]]] = {
    "one": ("shared", []),
    "two": ("shared", ["math"]),
    "all": ("broadcast", []),
    "code": ("broadcast", ["code", "logic"]),
}
BODIES = st.sampled_from([b"one", b"two" * 5000])
GROUPS = st.builds(
    Group,
    body=BODIES,
    env=st.sampled_from(["math", "code", "logic"]),
    size=st.integers(1, 4),
    tokens=st.sampled_from([10, 100]),
    version=st.integers(-1, 3),
)
PUTS = st.tuples(st.sampled_from(NAMES), GROUPS, st.sampled_from(["queued", "queued", "buffered"]))
SECONDS = st.sampled_from([10.0, 20.0, 40.0])
CHECKPOINTS = st.sampled_from(["step-1", "step-2", "step-3"])
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_groups": st.integers(1, 4),
        "max_sequences": st.integers(1, 8),
        "max_tokens": st.sampled_from([5, 50, 120]),
        "min_groups": st.integers(1, 3),
        "environments": st.lists(st.sampled_from(["math", "code", "none"]), max_size=2),
        "min_version": st.integers(-1, 3),
    },
)


class StoreMachine(RuleBasedStateMachine):
    """On SQLite; `postgres` is another place."""

    postgres: Postgres | None = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.where = f"{self.folder.name}/store.db"
        if self.postgres is not None:
            self.where = self.postgres.emptied()
        self.runner = asyncio.Runner()
        self.model = Model()
        self.wall = self.passed = 1000.0
        self.begin()
        self.model.now = self.wall

    def begin(self) -> None:
        clock = SteadyClock(lambda: self.wall, lambda: self.passed)
        self.opened: AbstractAsyncContextManager[Store] = open_store(self.where, clock=clock)
        self.store: Store = self.run(self.opened.__aenter__())

    def end(self) -> None:
        self.run(self.opened.__aexit__(None, None, None))

    def teardown(self) -> None:
        self.has_all_bodies()
        self.end()
        self.runner.close()
        self.folder.cleanup()

    def run(self, request: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await request

        return self.runner.run(wait())

    def both(self, method: str, *given: Any, model: tuple[Any, ...] = (), **named: Any) -> None:
        """The store answers, or refuses, as the model; `model` is what that is given, if other."""
        request = getattr(self.store, method)(*given, **named)
        try:
            expected = getattr(self.model, method)(*(model or given))
        except UsageError as error:
            with pytest.raises(type(error)):
                self.run(request)
        else:
            assert self.run(request) == expected

    @initialize(names=st.permutations(list(RUNS)))
    def begin_in_the_middle(self, names: list[str]) -> None:
        """Some groups, runs and leases, so that short examples reach far too."""
        self.create_run(names[0])
        kinds = [("math", 0), ("code", 1), ("math", 2), ("logic", -1), ("code", 2), ("math", 1)]
        for index, (env, version) in enumerate(kinds):
            known = Group(b"one", env, 1 + index % 3, 10, version)
            self.put([(NAMES[index], known, "buffered" if index == 3 else "queued")])
        self.create_run(names[1])
        self.lease_oldest(names[0], {"max_groups": 2}, 10.0)
        self.lease_oldest(names[1], {"max_groups": 1}, 40.0)
        for lease_id in list(self.model.leases)[:1]:
            self.run(self.store.ack(lease_id, checkpoint="step-1"))
            self.model.ack(lease_id, "step-1")

    # Groups

    @rule(wanted=st.lists(PUTS, max_size=5))
    def put(self, wanted: list[tuple[str, Group, Any]]) -> None:
        puts, expected = [], []
        for name, one, state in wanted:
            facts = {"env": one.env, "size": one.size, "tokens": one.tokens, "state": state}
            puts.append(group(name, one.body, policy_version=one.version, **facts))
            known = Group(one.body, one.env, one.size, one.tokens, one.version)
            expected.append(self.model.put(name, known, state))
        assert self.run(self.store.put(puts)) == expected

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), to=st.sampled_from(STATES))
    def move(self, data: st.DataObject, to: Any) -> None:
        self.both("move", data.draw(self.some_groups()), to)

    def some_groups(self) -> st.SearchStrategy[list[str]]:
        return st.lists(st.sampled_from(list(self.model.groups)), max_size=3, unique=True)

    @rule(below=st.integers(-1, 4))
    def drop_stale(self, below: int) -> None:
        self.both("drop_stale", below)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), is_undone=st.booleans())
    def drop_damaged(self, data: st.DataObject, is_undone: bool) -> None:
        names = data.draw(self.some_groups())
        undo = self.some_lease(data) if is_undone and self.model.leases else None
        self.both("drop_damaged", dict.fromkeys(names, "test"), model=(names, undo), undo=undo)

    @rule(seconds=st.sampled_from([0.5, 20.5, 60.5]), by_size=st.booleans())
    def compact(self, seconds: float, by_size: bool) -> None:
        """Nothing was settled just so long ago: all times are whole seconds."""
        expected = self.model.compact(seconds)
        if by_size:  # all that may go, however new
            expected += self.model.compact(0.0)
        most = 0.0 if by_size else None
        done = self.run(self.store.compact(acked_hours=seconds / 3600, max_gb=most))
        assert done.groups == expected

    # Runs

    def opening(self, name: str) -> Awaitable[Run]:
        delivery, environments = RUNS[name]
        return self.store.create_run(
            name, batch_size=1, delivery=delivery, environments=environments
        )

    @rule(name=st.sampled_from(list(RUNS)))
    def create_run(self, name: str) -> None:
        delivery, environments = RUNS[name]
        request = self.opening(name)
        self.model.create_run(name, delivery, environments)
        assert self.run(request).state == "open"

    @rule(
        name=st.sampled_from(["all", "code"]),
        pieces=st.integers(1, 4),
        was_killed=st.booleans(),
        wanted=st.lists(PUTS, max_size=3),
        moved=st.sampled_from(NAMES),
    )
    def open_run_with_a_break(
        self, name: str, pieces: int, was_killed: bool, wanted: list[Any], moved: str
    ) -> None:
        """Its caller goes away, or all of the server; groups come; then somebody opens it again."""
        self.run(self.stopped_after(pieces, self.opening(name)))
        self.put(wanted)
        if moved in self.model.groups:
            self.both("move", [moved], "queued")
        if was_killed:
            self.reopen(True)
        self.create_run(name)

    async def stopped_after(self, pieces: int, request: Awaitable[Any]) -> None:
        opening = asyncio.ensure_future(request)
        for _ in range(pieces):
            seen = self.store.activity
            change = asyncio.ensure_future(self.store.wait_for_activity(0.05, since=seen))
            await asyncio.wait({opening, change}, return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
        opening.cancel()
        await asyncio.wait({opening})

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data())
    def close_run(self, data: st.DataObject) -> None:
        name = self.some_run(data)
        self.model.close_run(name)
        assert self.run(self.store.close_run(name)).state == "closed"

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data(), checkpoint=st.none() | CHECKPOINTS)
    def rewind(self, data: st.DataObject, checkpoint: str | None) -> None:
        self.both("rewind", self.some_run(data), checkpoint)

    # Leases

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data(), limits=LIMITS, seconds=SECONDS)
    def lease(self, data: st.DataObject, limits: dict[str, Any], seconds: float) -> None:
        self.lease_oldest(self.some_run(data), limits, seconds)

    def lease_oldest(self, name: str, limits: dict[str, Any], seconds: float) -> None:
        request = self.store.lease(name, seconds=seconds, **limits)
        self.took(name, request, lambda: self.model.choose(name, **limits), seconds)

    @precondition(lambda self: self.model.groups and self.model.runs)
    @rule(data=st.data(), seconds=SECONDS)
    def lease_chosen(self, data: st.DataObject, seconds: float) -> None:
        name, names = self.some_run(data), data.draw(self.some_groups())

        def choose() -> list[str]:
            self.model.check_chosen(name, names)
            return names

        self.took(name, self.store.lease(name, group_ids=names, seconds=seconds), choose, seconds)

    def took(
        self, run: str, request: Awaitable[Any], choose: Callable[[], list[str]], seconds: float
    ) -> None:
        try:
            names = choose()
        except UsageError as error:
            with pytest.raises(type(error)):
                self.run(request)
            return
        lease = self.run(request)
        if not names:
            assert lease is None
            return
        assert [row.group_id for row in lease.groups] == names
        assert lease.expires_at == self.model.now + seconds
        self.model.lease(lease.lease_id, run, names, seconds)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), checkpoint=st.none() | CHECKPOINTS)
    def ack(self, data: st.DataObject, checkpoint: str | None) -> None:
        lease_id = self.some_lease(data)
        self.both("ack", lease_id, model=(lease_id, checkpoint), checkpoint=checkpoint)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), reason=st.sampled_from(["", "too long"]))
    def nack(self, data: st.DataObject, reason: str) -> None:
        lease_id = self.some_lease(data)
        self.both("nack", lease_id, model=(lease_id, reason), reason=reason)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), others=st.lists(st.integers(0, 5), max_size=1))
    def set_aside(self, data: st.DataObject, others: list[int]) -> None:
        lease_id = self.some_lease(data)
        held = self.model.leases[lease_id].groups
        known = list(self.model.groups)
        names = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        names += [known[n] for n in others if n < len(known) and known[n] not in names]
        self.both("set_aside", lease_id, names, model=(lease_id, names, "unread"), reason="unread")

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), seconds=SECONDS)
    def extend(self, data: st.DataObject, seconds: float) -> None:
        self.both("extend", self.some_lease(data), seconds)

    def some_run(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.model.runs)))

    def some_lease(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.model.leases)))

    @rule()
    def expire(self) -> None:
        assert set(self.run(self.store.expire())) == self.model.expire()

    # Time, and the end of the process

    @rule(seconds=st.sampled_from([1.0, 11.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.passed += seconds
        self.model.now += seconds

    @rule(seconds=st.sampled_from([-5000.0, -30.0, 30.0, 5000.0]))
    def set_the_clock(self, seconds: float) -> None:
        self.wall += seconds

    @rule(was_killed=st.booleans())
    def reopen(self, was_killed: bool) -> None:
        self.has_all_bodies()
        self.end()
        if was_killed:
            self.forget_memory()
        self.begin()
        self.model.now = max(self.model.now, self.wall)
        self.model.conflicting_puts = 0

    def forget_memory(self) -> None:
        """What is written down at an orderly end only, so that nothing has to be counted."""
        forget = "DELETE FROM \"values\" WHERE key = 'store.memory'"
        if self.postgres is not None:
            self.postgres.execute(forget)
            return
        with contextlib.closing(sqlite3.connect(self.where)) as connection:
            connection.execute(forget)
            connection.commit()

    # What both say

    def has_all_bodies(self) -> None:
        kept = {name: one.body for name, one in self.model.groups.items() if one.kept}
        assert self.run(self.store.bodies(list(kept))) == list(kept.values())

    @invariant()
    def says_the_same(self) -> None:
        counts = self.model.counts()
        assert self.run(self.store.counts()) == {state: counts[state] for state in STATES}
        assert self.run(self.store.depths()) == self.model.depths()
        rows = self.run(self.store.pending())
        assert [row.group_id for row in rows] == self.model.named("queued", "buffered")
        for row in rows:
            known = self.model.queues[SHARED][row.group_id]
            assert (row.state, row.lease_id) == (known.state, known.lease_id)
        damaged = [one.group_id for one in self.run(self.store.damaged(len(NAMES)))]
        assert sorted(damaged) == sorted(self.model.damaged)
        counters = +self.model.counters
        conflicting = {"conflicting_puts": self.model.conflicting_puts}
        assert self.run(self.store.counters()) == {**counters, **conflicting}

    @invariant()
    def has_the_same_checkpoints(self) -> None:
        for name, run in self.model.runs.items():
            known = [one.name for one in self.run(self.store.checkpoints(name))]
            assert set(known) == set(run.checkpoints)
            numbers = [run.checkpoints[one] for one in known]
            assert numbers == sorted(numbers)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a queue is filled in several transactions."""
    monkeypatch.setattr(deliveries, "FILLED_AT_ONCE", 3)


def try_machine(postgres: Postgres | None, examples: int, steps: int) -> None:
    machine = type("Machine", (StoreMachine,), {"postgres": postgres})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            # Each try opens a store: shrinking would take minutes, and the examples are short.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_the_store_does_what_the_model_does_on_sqlite() -> None:
    try_machine(None, 5, 25)


def test_the_store_does_as_the_model_on_postgresql(postgres: Postgres, postgres_url: str) -> None:
    try_machine(postgres, 1, 25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_store_does_as_the_model_for_long(kind: str, request: pytest.FixtureRequest) -> None:
    postgres = None if kind == "sqlite" else request.getfixturevalue("postgres")
    try_machine(postgres, 100 if kind == "sqlite" else 30, 50)
