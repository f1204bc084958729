"""The store against a simple model: whatever is asked in whatever order, both say the same."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from envserver.errors import ConflictError, UsageError
from envserver.store import GroupPut, Store, open_store

MEMORY = Path("/dev/shm")
"""Durability is tested elsewhere."""
NAMES = [f"group-{index}" for index in range(12)]
STATES = ["buffered", "queued", "leased", "acked", "dropped"]
PUTS = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from([b"one", b"two" * 5000]),
    st.sampled_from(["queued", "buffered"]),
)
SECONDS = st.sampled_from([10.0, 20.0, 40.0])


@dataclass
class Group:
    body: bytes
    state: str
    lease_id: str | None = None


@dataclass
class Lease:
    group_ids: list[str]
    expires_at: float
    state: str = "open"


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.runner = asyncio.Runner()
        self.now = 0.0
        self.groups: dict[str, Group] = {}  # in order of arrival
        self.leases: dict[str, Lease] = {}
        self.conflicting_puts = 0
        self.open()
        self.run(self.store.create_run("run", batch_size=1))

    def open(self) -> None:
        path = Path(self.folder.name) / "store.db"
        self.opened: AbstractAsyncContextManager[Store] = open_store(path, clock=lambda: self.now)
        self.store: Store = self.run(self.opened.__aenter__())

    def close(self) -> None:
        self.run(self.opened.__aexit__(None, None, None))

    def teardown(self) -> None:
        self.has_all_bodies()
        self.close()
        self.runner.close()
        self.folder.cleanup()

    def run(self, request: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await request

        return self.runner.run(wait())

    def refused(self, request: Awaitable[Any], error: type[UsageError] = ConflictError) -> None:
        with pytest.raises(error):
            self.run(request)

    @initialize()
    def begin_in_the_middle(self) -> None:
        """Some groups of each kind and two leases, so that short examples reach far too."""
        self.put([(name, b"one", "queued") for name in NAMES[:6]])
        self.put([(name, b"one", "buffered") for name in NAMES[6:8]])
        self.lease_oldest(2, 10.0)
        self.lease_oldest(1, 40.0)

    @rule(wanted=st.lists(PUTS, max_size=5))
    def put(self, wanted: list[tuple[str, bytes, Any]]) -> None:
        expected = []
        for name, body, state in wanted:
            expected.append(name not in self.groups)
            known = self.groups.setdefault(name, Group(body, state))
            self.conflicting_puts += known.body != body
        puts = [
            GroupPut(
                group_id=name,
                env="env",
                format="group",
                body=body,
                size=1,
                tokens=1,
                max_length=1,
                state=state,
            )
            for name, body, state in wanted
        ]
        assert self.run(self.store.put(puts)) == expected

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), to=st.sampled_from(STATES))
    def move(self, data: st.DataObject, to: Any) -> None:
        names = data.draw(st.lists(st.sampled_from(list(self.groups)), max_size=3, unique=True))
        allowed = {"queued": {"buffered"}, "dropped": {"buffered", "queued"}}.get(to, set())
        if any(self.groups[name].state not in allowed for name in names):
            self.refused(self.store.move(names, to))
            return
        self.run(self.store.move(names, to))
        for name in names:
            self.groups[name] = Group(self.groups[name].body, to)

    @rule(max_groups=st.none() | st.integers(1, 4), seconds=SECONDS)
    def lease_oldest(self, max_groups: int | None, seconds: float) -> None:
        self.expire_model()
        names = self.named("queued")[:max_groups]
        lease = self.run(self.store.lease("run", max_groups=max_groups, seconds=seconds))
        self.took(lease, names, seconds)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), seconds=SECONDS)
    def lease_chosen(self, data: st.DataObject, seconds: float) -> None:
        names = data.draw(st.lists(st.sampled_from(list(self.groups)), max_size=3, unique=True))
        self.expire_model()
        request = self.store.lease("run", group_ids=names, seconds=seconds)
        if any(self.groups[name].state != "queued" for name in names):
            self.refused(request)
        else:
            self.took(self.run(request), names, seconds)

    def took(self, lease: Any, names: list[str], seconds: float) -> None:
        if not names:
            assert lease is None
            return
        assert [row.group_id for row in lease.groups] == names
        assert lease.expires_at == self.now + seconds
        self.leases[lease.lease_id] = Lease(names, lease.expires_at)
        self.set_groups(names, "leased", lease.lease_id)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        lease_id = self.settle(data, "acked", self.store.ack)
        if lease_id is not None:
            self.set_groups(self.leases[lease_id].group_ids, "acked", lease_id)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        lease_id = self.settle(data, "nacked", self.store.nack)
        if lease_id is not None:
            self.set_groups(self.leases[lease_id].group_ids, "queued", None)

    def settle(
        self, data: st.DataObject, state: str, act: Callable[[str], Awaitable[None]]
    ) -> str | None:
        """The lease that is now in `state`; None when nothing changed."""
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        if self.leases[lease_id].state == state:
            self.run(act(lease_id))  # twice is once
            return None
        if not self.has_its_claim(lease_id):
            self.refused(act(lease_id))
            return None
        self.run(act(lease_id))
        self.leases[lease_id].state = state
        return lease_id

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), seconds=SECONDS)
    def extend(self, data: st.DataObject, seconds: float) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        if not self.has_its_claim(lease_id):
            self.refused(self.store.extend(lease_id, seconds))
            return
        assert self.run(self.store.extend(lease_id, seconds)) == self.now + seconds
        lease = self.leases[lease_id]
        lease.state, lease.expires_at = "open", self.now + seconds
        self.set_groups(lease.group_ids, "leased", lease_id)

    def has_its_claim(self, lease_id: str) -> bool:
        lease = self.leases[lease_id]
        held = [self.groups[name] for name in lease.group_ids]
        return lease.state == "open" or (
            lease.state == "expired"
            and all((group.state, group.lease_id) == ("queued", lease_id) for group in held)
        )

    @rule(seconds=st.sampled_from([1.0, 11.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        assert set(self.run(self.store.expire())) == self.expire_model()

    def expire_model(self) -> set[str]:
        overdue = {
            lease_id: lease
            for lease_id, lease in self.leases.items()
            if lease.state == "open" and lease.expires_at <= self.now
        }
        for lease_id, lease in overdue.items():
            lease.state = "expired"
            self.set_groups(lease.group_ids, "queued", lease_id)
        return set(overdue)

    @rule()
    def reopen(self) -> None:
        self.has_all_bodies()
        self.close()
        self.open()
        self.conflicting_puts = 0

    def has_all_bodies(self) -> None:
        bodies = self.run(self.store.bodies(list(self.groups)))
        assert bodies == [group.body for group in self.groups.values()]

    def set_groups(self, names: list[str], state: str, lease_id: str | None) -> None:
        for name in names:
            self.groups[name].state = state
            self.groups[name].lease_id = lease_id

    def named(self, *states: str) -> list[str]:
        return [name for name, group in self.groups.items() if group.state in states]

    @invariant()
    def says_the_same(self) -> None:
        counts = {state: len(self.named(state)) for state in STATES}
        assert self.run(self.store.counts()) == counts
        rows = self.run(self.store.pending())
        assert [row.group_id for row in rows] == self.named("queued", "buffered")
        for row in rows:
            group = self.groups[row.group_id]
            assert (row.state, row.lease_id) == (group.state, group.lease_id)
        assert self.store.conflicting_puts == self.conflicting_puts


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    # Each try opens a store: shrinking would take minutes, and the examples are short.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
