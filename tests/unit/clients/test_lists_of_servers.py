"""Clients that were given several URLs: one server fails in any way, and they go on at another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import httpx
import pytest
from envserver_clients.adapters.atropos import AtroposTrainerClient
from envserver_clients.http import EnvClient, Retries, ServerUnreachable, SyncEnvClient
from envserver_clients.records import Batch
from envserver_records import servers
from envserver_records.servers import AsyncServersClient, ServersClient
from support.api import Api, wire_group
from support.doors import Door, State, doors
from support.waiting import until

from envserver.export.stored_sources import open_source
from envserver.proxy import Gate

QUICK = Retries(tries=3, first_pause_seconds=0.01)


@pytest.fixture
async def two(api: Api) -> AsyncIterator[list[Door]]:
    async with doors(api.url) as made:
        yield made


def urls(two: list[Door]) -> list[str]:
    return [door.url for door in two]


def ids(batch: Batch) -> list[str]:
    return [group.group_id for group in batch.groups]


def test_a_path_a_query_and_a_password_belong_to_their_server() -> None:
    seen: list[tuple[str, str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent = request.headers
        seen.append((str(request.url), sent["host"], sent.get("authorization")))
        return httpx.Response(503 if request.url.host == "a" else 200)

    transport = httpx.MockTransport(answer)
    with ServersClient("http://a:1/x/,http://me:secret@b:2/y", transport=transport) as http:
        assert http.get("/v1/groups?after=a%2Fb").status_code == 200
        assert http.get("/v1/status").status_code == 200  # not a again
        http.get("http://elsewhere/")
    basic = "Basic bWU6c2VjcmV0"
    assert seen == [
        ("http://a:1/x/v1/groups?after=a%2Fb", "a:1", None),
        ("http://me:secret@b:2/y/v1/groups?after=a%2Fb", "b:2", basic),
        ("http://me:secret@b:2/y/v1/status", "b:2", basic),
        ("http://elsewhere/", "elsewhere", None),
    ]


@pytest.mark.parametrize(
    "state",
    [
        "loses answers",
        pytest.param("closed", marks=pytest.mark.thorough),
        pytest.param(503, marks=pytest.mark.thorough),
    ],
)
async def test_every_request_is_done_once_though_each_fails_at_the_first_server(
    state: State, api: Api, two: list[Door], gate: Gate
) -> None:
    await api.put("a", "b", "c", "d", "e")
    first, second = two
    client = EnvClient(urls(two), run="run", batch_size=1, retries=QUICK)

    async def done(request: Awaitable[Any]) -> Any:
        """The server that answered last fails when this is asked."""
        nonlocal first, second
        first, second = second, first
        first.shut(state)
        second.shut("open")
        return await request

    async def leased(**how: int) -> Batch:
        batch: Batch | None = await done(client.lease(**how))
        assert batch is not None
        return batch

    first.shut(state)
    async with client:
        for step, name in enumerate("abc"):
            batch = await leased(wait_seconds=5)
            assert ids(batch) == [name]
            await done(client.extend(batch, 100))
            await done(client.ack(batch, checkpoint=f"step-{step}"))
        assert (await done(client.resume("step-1")))["redelivered"] in (0, 1)
        again = await leased()
        assert ids(again) == ["c"]
        await done(client.nack(again, reason="test"))
        last = await leased(max_groups=3)
        assert ids(last) == ["c", "d", "e"]
        await done(client.set_aside(last, ["d"], reason="unusable"))
        await done(client.ack(last))
        await done(client.publish_policy_version(3))
        await done(client.pause_calls("keep"))
        assert gate.paused
        await done(client.resume_calls(4))
        assert not gate.paused
        assert (await done(client.status()))["policy_version"] == 4
        assert len(await done(client.list_groups())) == 5
        await done(client.close_run())
    counts = await api.store.counts()
    assert (counts["acked"], counts["dropped"], counts["leased"]) == (4, 1, 0)
    counters = await api.store.counters()
    assert (counters["nacked: test"], counters["set_aside: unusable"]) == (1, 1)


async def test_copies_that_come_late_undo_nothing(api: Api, two: list[Door], gate: Gate) -> None:
    await api.put("a", "b")
    async with EnvClient(urls(two), run="run", batch_size=1, retries=QUICK) as client:
        two[0].shut("loses answers")
        batch = await client.lease()
        assert batch is not None
        two[1].shut("loses answers")
        two[0].shut("open")
        await client.pause_calls("keep")
        await client.ack(batch, checkpoint="one")
        await client.resume_calls(1)
        await two[0].come_late()
        await two[1].come_late()
        assert not gate.paused
        two[0].shut("loses answers")
        two[1].shut("open")
        two[0].late.clear()
        await client.resume_calls()
        await client.pause_calls("keep")
        await two[0].come_late()
        assert gate.paused
    counts = await api.store.counts()
    assert (counts["acked"], counts["queued"], counts["leased"]) == (1, 1, 0)


async def test_a_stream_goes_on_at_another_server(api: Api, two: list[Door]) -> None:
    names = [f"g{number}" for number in range(6)]
    seen = []
    async with EnvClient(urls(two), run="run", batch_size=1, retries=QUICK) as client:
        stream = client.stream(window=2)
        await api.put(*names)
        async for batch in stream:
            seen += ids(batch)
            if len(seen) in (1, 3, 5):
                two[len(seen) // 2 % 2].shut()  # the one that it is at
                two[1 - len(seen) // 2 % 2].shut("open")
            await client.ack(batch)
            if len(seen) == len(names):
                break
        await stream.aclose()
    assert seen == names
    assert all(any("/stream" in line for line in door.came) for door in two)


@pytest.mark.parametrize("way", ["lease", "stream"])
async def test_a_frozen_server_is_left(
    way: str, api: Api, two: list[Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncServersClient, "quiet_seconds", 0.2)
    monkeypatch.setattr(servers, "_ALIVE_SECONDS", 1.0)
    patient = Retries(tries=60, first_pause_seconds=0.01)

    async def at_the_second() -> None:
        await until(lambda: any(f"/{way}" in line for line in two[1].came))
        await api.put("b")

    await api.put("a")
    async with EnvClient(urls(two), run="run", batch_size=1, retries=patient) as client:
        if way == "stream":
            stream = client.stream()
            await anext(stream)
            two[0].state = "frozen"  # its connection stays, and says nothing any more
            await at_the_second()
            got = await anext(stream)
            await stream.aclose()
        else:
            await client.ack(await client.lease() or "")
            two[0].state = "frozen"
            waiting = asyncio.create_task(client.lease(wait_seconds=60))
            await at_the_second()
            leased = await waiting
            assert leased is not None
            got = leased
        assert ids(got) == ["b"]


async def test_a_server_that_is_only_slow_is_waited_for(
    api: Api, two: list[Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncServersClient, "quiet_seconds", 0.02)
    monkeypatch.setattr(servers, "_ALIVE_SECONDS", 60.0)
    async with EnvClient(urls(two), run="run", batch_size=1, retries=QUICK) as client:
        waiting = asyncio.create_task(client.lease(wait_seconds=60))
        await until(lambda: sum("/healthz" in line for line in two[0].came) >= 3)
        await api.put("a")
        assert await waiting is not None
    assert two[1].came == []


async def test_the_error_names_every_server_and_why(two: list[Door]) -> None:
    two[0].shut("closed")
    two[1].shut(503)
    client = EnvClient(",".join(urls(two)), run="run", retries=QUICK)
    with pytest.raises(ServerUnreachable, match="No answer after 3 tries") as caught:
        await client.register()
    await client.close()
    assert f"{two[0].url}: " in caught.value.message
    assert f"{two[1].url}: HTTP 503: Nobody leads." in caught.value.message


@pytest.mark.parametrize(
    ("wire", "state"),
    [("native", "closed"), ("atropos", "loses answers"), ("acknowledged", "loses answers")],
)
async def test_clients_without_asyncio_go_on_too(
    wire: str, state: State, api: Api, two: list[Door]
) -> None:
    def opened() -> SyncEnvClient | AtroposTrainerClient:
        if wire == "native":
            return SyncEnvClient(urls(two), run="run", batch_size=1, retries=QUICK)
        is_told = wire == "acknowledged"
        return AtroposTrainerClient(
            urls(two), group_size=2, batch_size=1, acknowledged=is_told, retries=QUICK
        )

    def train() -> list[int]:
        seen = []
        with opened() as client:
            for door, other in (two, two[::-1], two):
                door.shut(state)
                other.shut("open")
                batch = client.lease()
                assert batch is not None
                seen.append(int(batch.rows[0].tokens[0]))
                client.ack(batch)
            assert client.lease() is not None
        return seen

    for mark in range(4):
        await api.post("/scored_data", wire_group(mark=mark))
    assert await asyncio.to_thread(train) == [0, 1, 2]
    # Taking is acknowledging for a trainer that does not acknowledge, and for no other.
    assert (await api.store.counts())["acked"] == (4 if wire == "atropos" else 3)


async def test_groups_are_read_from_another_server(api: Api, two: list[Door]) -> None:
    await api.put("a", "b")
    two[0].shut()
    assert len(await asyncio.to_thread(lambda: list(open_source(",".join(urls(two)))))) == 2
