"""Streams of leases over real HTTP: windows, disconnects, broken connections."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from envserver_clients.http import EnvClient, SyncEnvClient
from support.api import Api, wire_group
from support.stores import group, noise
from support.waiting import PATIENCE, until

from envserver import ConflictError
from envserver.trainers.leasing import Leasing


@pytest.fixture
async def api(api: Api) -> Api:
    await api.run(batch_size=1)
    return api


class Listener:
    """What one connection of server-sent events says."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> tuple[str, list[str]]:
        """The id of the next lease and its groups."""
        event: dict[str, str] = {}
        async with asyncio.timeout(PATIENCE):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                event[name] = value
                if not line and "data" in event:
                    lease = json.loads(event["data"])
                    assert (event["event"], event["id"]) == ("lease", lease["lease_id"])
                    return event["id"], [group["group_id"] for group in lease["groups"]]
                if not line:
                    event = {}
        raise EOFError

    async def is_silent(self) -> bool:
        """Whether nothing comes for a while."""
        waiting = asyncio.ensure_future(self.next())
        await asyncio.wait({waiting}, timeout=0.3)
        waiting.cancel()
        return not waiting.done()


@asynccontextmanager
async def events(api: Api, **query: Any) -> AsyncIterator[Listener]:
    async with api.http.stream(
        "GET", "/v1/runs/run/stream", params=query, headers={"accept": "text/event-stream"}
    ) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Listener(answer.aiter_lines())


async def test_events_come_as_far_as_the_window_goes_and_acks_and_nacks_make_room(api: Api) -> None:
    async with events(api, window=2) as listener:
        await api.put("a", "b", "c", "d")
        first, groups = await listener.next()
        assert groups == ["a"]
        assert (await listener.next())[1] == ["b"]
        assert await listener.is_silent()
    async with events(api, window=1) as another:
        assert (await another.next())[1] == ["c"]
        assert await another.is_silent()
    assert await api.end("ack", {"lease_id": first}) == 204
    assert await api.leased() == ["d"]
    await api.put("e", "f", "g")
    await api.post("/scored_data", wire_group(2, 5))
    async with events(api, window=1) as listener:
        seen = []
        for what in ("ack", "nack", "ack", "ack"):
            lease_id, groups = await listener.next()
            seen += groups
            assert await api.end(what, {"lease_id": lease_id}) == 204
        assert seen == ["e", "f", "f", "g"]
        assert len((await listener.next())[1]) == 1  # what was posted over the other wire


async def test_a_lease_that_an_older_connection_is_making_comes_over_the_newer_one(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, making, looked = asyncio.Event(), asyncio.Event(), asyncio.Event()
    make, look = Leasing.lease, api.store.open_leases

    async def slow(leasing: Leasing, *args: Any) -> Any:
        if idle.is_set() and not making.is_set():
            making.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await looked.wait()
        made = await make(leasing, *args)
        if made is None:
            idle.set()
        return made

    async def seen(run: str) -> Any:
        found = await look(run)
        if making.is_set():
            looked.set()
        return found

    monkeypatch.setattr(Leasing, "lease", slow)
    monkeypatch.setattr(api.store, "open_leases", seen)
    async with events(api, window=1, stream="my-stream"):
        await idle.wait()
        await api.put("a")
        await making.wait()
        async with events(api, window=1, stream="my-stream") as newer:
            assert (await newer.next())[1] == ["a"]


async def test_a_client_that_hangs_up_keeps_its_leases_or_gives_them_back(api: Api) -> None:
    await api.put("a", "b")
    async with events(api, window=1, on_hangup="keep") as keeping:
        assert (await keeping.next())[1] == ["a"]
    async with events(api, window=1, on_hangup="give_back") as giving:
        assert (await giving.next())[1] == ["b"]
    assert await api.leased(max_groups=9, wait_seconds=20) == ["b"]
    await api.put("c")
    async with events(api, window=1, seconds=0.2) as listener:  # one that expires makes room
        first, groups = await listener.next()
        second, again = await listener.next()
        assert (groups, again) == (["c"], ["c"])
        assert second > first


async def test_no_stream_of_what_is_not_there(api: Api) -> None:
    for path, status in (("nobody/stream", 404), ("run/stream?window=0", 422)):
        assert await api.status("GET", f"/v1/runs/{path}") == status
    async with EnvClient(api.url, run="other") as client:
        await client.close_run()
        with pytest.raises(ConflictError, match="closed"):
            await anext(client.stream())


@pytest.mark.parametrize("compress", [True, False])
async def test_the_client_trains_while_the_next_batches_come(api: Api, compress: bool) -> None:
    names = [f"g{number}" for number in range(6)]
    await api.put(*names)
    await api.post("/scored_data", wire_group(2, 5))
    seen = []
    async with EnvClient(api.url, run="run", batch_size=2, compress=compress) as client:
        async for batch in client.stream(window=2, whole=False):
            seen += [group.group_id for group in batch.groups]
            assert all(len(row.tokens) > 2 for row in batch.rows)
            await client.ack(batch)
            if len(seen) == 7:
                break
        assert [batch async for batch in client.stream(idle_seconds=0.3)] == []
    assert seen[:6] == names


async def test_what_was_not_read_is_given_back(api: Api) -> None:
    await api.put("a", "b", "c")
    async with EnvClient(api.url, run="run", batch_size=1) as client:
        batches = client.stream(window=3)
        assert [g.group_id for g in (await anext(batches)).groups] == ["a"]
        await until(lambda: batches.ag_frame.f_locals["arrived"].qsize() == 2)  # b and c
        await batches.aclose()
    assert await api.leased(max_groups=9, wait_seconds=20) == ["b", "c"]


async def test_for_who_does_not_read_nothing_piles_up(api: Api) -> None:
    """The server leases no more than it can send, however wide the window is."""
    for number in range(24):
        await api.store.put([group(f"g{number}", noise(2**20, number))])
    async with api.http.stream("GET", "/v1/runs/run/stream?window=64") as answer:
        assert answer.status_code == 200
        seen = [0, 0]
        while not seen[-1] or seen[-1] != seen[-2]:
            await asyncio.sleep(0.5)
            seen.append((await api.store.counts())["leased"])
        assert seen[-1] < 24


async def test_streams_without_asyncio(api: Api) -> None:
    await api.put("a", "b", "c")

    def train() -> list[str]:
        with SyncEnvClient(api.url, run="run", batch_size=1) as client:
            seen = []
            for batch in client.stream():
                seen.append(batch.groups[0].group_id)
                client.ack(batch)
                if len(seen) == 3:
                    break
            assert list(client.stream(idle_seconds=0.3)) == []
            return seen

    assert await asyncio.to_thread(train) == ["a", "b", "c"]
