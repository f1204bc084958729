"""What a server does for many joiners: registrations, polls and silence."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from envserver_records.errors import StoreFull
from envserver_records.records import pack
from sqlalchemy import create_engine, func, select
from support.api import running_api
from support.clocks import Clock
from support.cpu import cpu_limit
from support.joined import join, registration
from support.waiting import until

from envserver.api.runners import runner
from envserver.api.runners.polling import LONGEST_SECONDS, poll_seconds
from envserver.api.runners.registry import RunnerRegistry
from envserver.api.runners.sharing import SharedCapacity
from envserver.remote import Heartbeat, Registration
from envserver.remote.gate import RunnerGate
from envserver.remote.link import Link
from envserver.rollouts import Bounds
from envserver.store import GroupStore, open_store
from envserver.store.demand import Demand
from envserver.store.prefixes import begins_with
from envserver.store.schema import groups

MANY = 1000


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which a server notices who is silent."""
    clock = Clock()
    monkeypatch.setattr("envserver.api.heartbeats.time", clock)
    return clock


def registry_of(store: GroupStore) -> RunnerRegistry:
    return RunnerRegistry(store, Demand(store, Bounds(most_groups=1024, most_batches=3)))


def wanted(number: int) -> Registration:
    return Registration(**registration(f"math@{number}"))


async def test_each_registration_writes_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(tmp_path / "store.db") as store:
        written: list[int] = []
        set_values = store.set_values

        async def counted(values: Mapping[str, Any]) -> None:
            written.append(len(values))
            await set_values(values)

        monkeypatch.setattr(store, "set_values", counted)
        registry = registry_of(store)
        welcomes = await asyncio.gather(*[registry.register(wanted(n)) for n in range(100)])
        assert set(written) == {1}
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
    tmp_path: Path, silence: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MOST_RUNNERS", 3)
    async with open_store(tmp_path / "store.db") as store:
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
            names = {one.name for one in known.table.known.values()}
            assert names == {"math@1", "math@2", "math@3"}
        silence.ahead += 24 * 3600 + 1  # all were killed
        await registry.register(wanted(4))
        assert {one.name for one in registry.table.known.values()} == {"math@4"}


async def test_those_who_understand_it_poll_less_often_when_there_are_many(
    tmp_path: Path, silence: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [poll_seconds(n, 30) for n in (1, 250, 500, MANY, 9 * MANY)] == [5, 5, 10, 20, 20]
    assert poll_seconds(1, 6) == 1
    monkeypatch.setattr("envserver.api.runners.polling._BEATS_PER_SECOND", 0.01)
    async with running_api(tmp_path / "store.db") as api:
        old = await join(api, "math@old")
        assert "next_seconds" not in await old.beat()
        body = registration("math@new")
        answer = await api.http.post("/v1/environments?understands=next_seconds", json=body)
        new = type(old)(api, answer.json())
        assert (await new.beat())["next_seconds"] == LONGEST_SECONDS

        async def silent() -> list[bool]:
            shown = (await api.http.get("/v1/environments")).json()["environments"]
            return [one["silent"] for one in shown]

        silence.ahead += 31
        assert await silent() == [True, False], "it may say nothing for longer"
        silence.ahead += 30
        assert await silent() == [True, True]


async def test_a_joiner_waits_as_long_as_it_is_told_and_stops_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.api.runners.polling._BEATS_PER_SECOND", 0.01)
    sent: list[dict[str, Any]] = []
    async with running_api(tmp_path / "store.db") as api:

        class Seen(httpx.AsyncHTTPTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                if request.url.path.endswith("/heartbeat"):
                    sent.append(json.loads(request.content))
                return await super().handle_async_request(request)

        gate = RunnerGate()
        link = Link(api.url, wanted(1), gate=gate, transport=Seen())
        async with link.open():
            assert gate.longest_silence_seconds == 15
            living = asyncio.create_task(link.live())
            await until(lambda: len(sent) == 2)
            # The server takes it for silent after 60 seconds.
            assert gate.longest_silence_seconds == 30
            living.cancel()
            await asyncio.wait({living})
    assert [beat["wait_seconds"] for beat in sent] == [0, LONGEST_SECONDS]
    assert "next_seconds" not in sent[1]["seen"], "servers of older versions refuse it"


async def test_what_is_stored_of_a_stream_is_counted_over_sessions_and_restarts(
    tmp_path: Path,
) -> None:
    async def shown() -> int:
        (one,) = (await api.http.get("/v1/environments")).json()["environments"]
        return int(one["stored"])

    async with running_api(tmp_path / "store.db") as api:
        one = await join(api)
        await one.post(pack(one.group(0)))
        assert await shown() == 1
        one = await join(api)
        assert await shown() == 1
        await one.post(pack(one.group(1)))
        assert await shown() == 2
    async with running_api(tmp_path / "store.db") as api:
        one.api = api
        await one.post(pack(one.group(2)))
        assert await shown() == 3


async def test_a_thousand_joiners_cost_one_deal_for_many_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deals = 0
    deal = SharedCapacity.deal

    def counted(shared: SharedCapacity, everyone: Any) -> Any:
        nonlocal deals
        deals += 1
        assert len(everyone) == MANY
        return deal(shared, everyone)

    now = time.monotonic()
    stopped = SimpleNamespace(monotonic=lambda: now, thread_time=time.thread_time)
    for part in ("runners.news", "heartbeats"):  # on a busy machine the first would be silent
        monkeypatch.setattr(f"envserver.api.{part}.time", stopped)
    async with open_store(tmp_path / "store.db") as store:
        registry = registry_of(store)
        sessions = [await registry.register(wanted(n)) for n in range(MANY)]
        monkeypatch.setattr(SharedCapacity, "deal", counted)
        before = time.thread_time()
        for one in sessions:
            beat = Heartbeat(capacity=17, begun=1)
            assert (await registry.heartbeat(one.id, one.key, beat)).room >= 0
        spent = time.thread_time() - before
        assert deals == 1, "it serves all beats of the same moment"
        assert spent < MANY * cpu_limit(0.002)


def test_a_stream_is_counted_without_looking_at_the_others() -> None:
    dialect = create_engine("sqlite://").dialect
    condition = begins_with(groups.c.group_id, "math-train-0-", dialect)
    query = select(func.count()).select_from(groups).where(condition)
    text = str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE groups (seq INTEGER PRIMARY KEY, group_id TEXT UNIQUE)")
        names = [f"math-train-{seed}-{n}" for seed in (0, 1, 10) for n in range(3)] + [
            "math-train-0"
        ]
        database.executemany(
            "INSERT INTO groups (group_id) VALUES (?)", [(name,) for name in names]
        )
        assert database.execute(text).fetchone() == (3,)
        ((*_, plan),) = database.execute(f"EXPLAIN QUERY PLAN {text}")
        assert plan.startswith("SEARCH"), plan
