"""How the room that trainers leave is dealt to environments here and elsewhere."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from envserver_records.errors import ConflictError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.api import running_api
from support.cpu import cpu_limit
from support.extent import examples
from support.joined import join, registration

from envserver.api.runners.allotment import ExtraCapacity, fair_shares
from envserver.api.runners.local_sink import LocalEnvironmentSink
from envserver.api.runners.registry import RunnerRegistry
from envserver.remote import Heartbeat, Registration
from envserver.rollouts import CATCH_UP_GROUPS, Bounds, Share
from envserver.store import open_store
from envserver.store.demand import Demand


@settings(max_examples=examples(60), deadline=None)
@given(
    free=st.integers(0, 60),
    wants=st.dictionaries(st.sampled_from("abcd"), st.integers(-2, 30), min_size=1),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    minimums=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
@example(free=2, wants={"a": 2, "d": 2}, weights=[1.0] * 4, minimums=[0, 0, 1, 5e-324])
def test_places_are_dealt_to_those_who_want_them(
    free: int, wants: dict[str, int], weights: list[float], minimums: list[float]
) -> None:
    shares = fair_shares(map(Share, "abcd", weights, minimums))
    dealt = shares.upcoming(free, wants)
    wanted = {name: max(0, want) for name, want in wants.items()}
    assert all(0 <= dealt[name] <= wanted[name] for name in wants)
    assert sum(dealt.values()) == min(free, sum(wanted.values()))
    # The same as one turn after the other.
    asking = {name for name, want in wanted.items() if want}
    for _ in range(sum(dealt.values())):
        name = shares.next(asking)
        shares.begin(name)
        wanted[name] -= 1
        if not wanted[name]:
            asking.discard(name)
    given = {name: max(0, want) - wanted[name] for name, want in wants.items()}
    assert all(abs(given[name] - dealt[name]) <= 1 for name in wants), "equal turns in any order"


def test_a_thousand_are_dealt_all_places_at_little_cost() -> None:
    names = [f"joiner-{number}" for number in range(1000)]
    shares = fair_shares(map(Share, names))
    before = time.thread_time()
    for _ in range(10):
        dealt = shares.upcoming(16_000, dict.fromkeys(names, 17))
    assert set(dealt.values()) == {16}
    assert time.thread_time() - before < 10 * cpu_limit(0.02)


async def test_one_that_begins_nothing_does_not_get_all_places(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store.db") as store:
        demand = Demand(store, Bounds(most_groups=256, most_batches=3))
        registry = RunnerRegistry(store, demand, stretches=False)
        stuck, works = [
            await registry.register(Registration(**registration(f"math@{name}")))
            for name in ("stuck", "works")
        ]
        begun = held = room = 0
        for _ in range(40):
            beats = Heartbeat(capacity=400), Heartbeat(capacity=400, begun=begun)
            held, room = [
                (await registry.heartbeat(one.id, one.key, beat)).room
                for one, beat in zip((stuck, works), beats, strict=True)
            ]
            begun += room
        assert held <= 128 + CATCH_UP_GROUPS
        assert held + room == 256


async def test_what_was_begun_before_a_restart_of_the_server_counts_for_nothing(
    tmp_path: Path,
) -> None:
    async with running_api(tmp_path / "store.db") as api:
        one, two = await join(api), await join(api, "math@two")
        rooms = [
            (await joined.beat(capacity=400, begun=begun))["room"]
            for joined, begun in 2 * ((one, 100_000), (two, 3))
        ]
        assert rooms[2:] == [128, 128]


def test_in_the_long_run_each_has_its_share() -> None:
    shares = fair_shares([Share("a", 1), Share("b", 1, minimum=0.6), Share("c", 3)])
    begun = dict.fromkeys("abc", 0)
    for _ in range(500):
        for name, groups in shares.upcoming(2, dict.fromkeys("abc", 5)).items():
            for _ in range(groups):
                shares.begin(name)
                begun[name] += 1
    assert {name: round(groups / 1000, 1) for name, groups in begun.items()} == {
        "a": 0.1,
        "b": 0.6,
        "c": 0.3,
    }


def test_more_may_be_open_where_rollouts_are_long_and_no_more_where_trainers_are_slow() -> None:
    slack, begun, used = ExtraCapacity(), 8, 8
    assert slack.groups(0, 8, used, begun, at=0) == 4
    for _ in range(3):
        assert slack.groups(0, 8, 12, begun, at=1) == 4, "nothing was begun since"
    assert slack.groups(0, 8, 12, begun + 12, at=2) == 10
    assert slack.groups(0, 8, 11, begun + 99, at=2) == 10, "not all places are taken"
    assert [slack.groups(7, 8, 0, begun, at=second) for second in (3, 3.1, 4, 5, 6)] == [
        *(5, 5, 2, 1, 0)
    ]


async def test_the_servers_own_environments_share_the_room(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store.db") as store:
        demand = Demand(store, Bounds(most_groups=4, most_batches=3))
        elsewhere = RunnerRegistry(store, demand, stretches=False)
        own = LocalEnvironmentSink(
            store, demand, elsewhere, share=Share("math"), prefix="math-train-0-", capacity=9
        )
        with pytest.raises(ConflictError):
            await elsewhere.register(Registration(**registration("math")))
        one = await elsewhere.register(Registration(**registration()))
        assert one.seed == 1, "the server itself makes the stream of seed 0"
        news = await elsewhere.heartbeat(one.id, one.key, Heartbeat(capacity=9))
        assert news.room == 2
        for _ in range(2):
            await own.wait_for_capacity()
            own.opened(1)
        third = asyncio.create_task(own.wait_for_capacity())
        await asyncio.sleep(0.05)
        assert not third.done()
        await elsewhere.goodbye(one.id, one.key)
        await third
