"""What a server does for many joiners: registrations, polls, silence, and the room they get."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from envserver_records.errors import ConflictError, StoreFull
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.api import Api, join, registration
from support.clocks import Clock
from support.extent import examples

from envserver.api.runners import runner
from envserver.api.runners.allotment import fair_shares
from envserver.api.runners.local_sink import LocalEnvironmentSink
from envserver.api.runners.polling import LONGEST_SECONDS
from envserver.api.runners.registry import RunnerRegistry
from envserver.remote import Heartbeat, Registration
from envserver.rollouts import CATCH_UP_GROUPS, Bounds, Share
from envserver.store import GroupStore, open_store
from envserver.store.demand import Demand


def registry_of(store: GroupStore) -> RunnerRegistry:
    return RunnerRegistry(store, Demand(store, Bounds(most_groups=1024, most_batches=3)))


def wanted(number: int) -> Registration:
    return Registration(**registration(f"math@{number}"))


async def test_registrations_at_once_have_each_its_stream(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store.db") as store:
        registry = registry_of(store)
        welcomes = await asyncio.gather(*[registry.register(wanted(n)) for n in range(100)])
        assert {one.seed for one in welcomes} == set(range(100)), "each has its own stream"
        again = await asyncio.gather(*[registry.register(wanted(7)) for _ in range(3)])
        assert {one.id for one in again} == {welcomes[7].id}
    async with open_store(tmp_path / "store.db") as store:
        registry = registry_of(store)
        await registry.load()
        for one in welcomes[:7] + welcomes[8:]:
            assert registry.authenticate(one.id, one.key).seed == one.seed


async def test_the_registrations_of_an_older_store_are_taken_over(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store.db") as store:
        registry = registry_of(store)
        one, two = [await registry.register(wanted(n)) for n in range(2)]
        rows = await store.values_with_prefix("environment:")
        old = [{key: row[key] for key in row if key != "understands"} for row in rows.values()]
        await store.set_values(dict.fromkeys(rows) | {"environments": old})
    for _ in range(2):
        async with open_store(tmp_path / "store.db") as store:
            registry = registry_of(store)
            await registry.load()
            assert await store.get_value("environments") is None
            for welcome in (one, two):
                assert registry.authenticate(welcome.id, welcome.key).seed == welcome.seed


async def test_those_that_left_make_room_for_others(
    store: GroupStore, silence: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MOST_RUNNERS", 3)
    registry = registry_of(store)
    first = [await registry.register(wanted(n)) for n in range(3)]
    with pytest.raises(StoreFull):
        await registry.register(wanted(3))
    for one in (first[1], first[0]):
        await registry.goodbye(one.id, one.key)
    back = await registry.register(wanted(1))
    assert back.id == first[1].id
    await registry.register(wanted(3))
    again = registry_of(store)
    await again.load()
    for known in (registry, again):
        assert {one.name for one in known.table.known.values()} == {"math@1", "math@2", "math@3"}
    silence.ahead += 24 * 3600 + 1  # all were killed
    await registry.register(wanted(4))
    assert {one.name for one in registry.table.known.values()} == {"math@4"}


async def test_those_who_understand_it_poll_less_often_when_there_are_many(
    api: Api, silence: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.api.runners.polling._BEATS_PER_SECOND", 0.01)
    old = await join(api, "math@old")
    assert "next_seconds" not in await old.beat()
    new = await join(api, "math@new", "?understands=next_seconds")
    assert (await new.beat())["next_seconds"] == LONGEST_SECONDS

    async def silent() -> list[bool]:
        shown = (await api.http.get("/v1/environments")).json()["environments"]
        return [one["silent"] for one in shown]

    silence.ahead += 31
    assert await silent() == [True, False], "it may say nothing for longer"
    silence.ahead += 30
    assert await silent() == [True, True]


@settings(max_examples=examples(60))
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
    dealt = fair_shares(map(Share, "abcd", weights, minimums)).upcoming(free, wants)
    wanted = {name: max(0, want) for name, want in wants.items()}
    assert all(0 <= dealt[name] <= wanted[name] for name in wants)
    assert sum(dealt.values()) == min(free, sum(wanted.values()))


async def test_one_that_begins_nothing_does_not_get_all_places(store: GroupStore) -> None:
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


async def test_what_was_begun_before_a_restart_of_the_server_counts_for_nothing(api: Api) -> None:
    one, two = await join(api), await join(api, "math@two")
    rooms = [
        (await joined.beat(capacity=400, begun=begun))["room"]
        for joined, begun in 2 * ((one, 100_000), (two, 3))
    ]
    assert rooms[2:] == [128, 128]


async def test_the_servers_own_environments_share_the_room(store: GroupStore) -> None:
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
