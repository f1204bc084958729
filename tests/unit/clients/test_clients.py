"""The HTTP clients against a real server: numpy batches, acknowledging, retries, typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from envserver_clients.http import EnvClient, Retries, ServerUnreachable, SyncEnvClient
from envserver_clients.records import decode_batch
from support.api import Api, native_group, put_native, running_api, wire_group
from support.commands import free_port

from envserver import ConflictError, InputError, NotFoundError, StoreError
from envserver.store import GroupPut

QUICK = Retries(tries=3, first_pause_seconds=0.01)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db") as running:
        yield running


async def put(api: Api, *group_ids: str) -> None:
    for group_id in group_ids:
        await put_native(api.store, native_group(group_id, truncated=True))


async def test_rows_of_our_own_groups_are_the_arrays_that_were_stored(api: Api) -> None:
    await put(api, "a")
    async with EnvClient(api.url, run="run", batch_size=1) as client:
        batch = await client.lease()
        assert batch is not None
        (group,) = batch.groups
        assert (group.group_id, group.env, group.policy_version) == ("a", "math", 7)
        first, second = batch.rows
        assert first.tokens.dtype == np.int32
        assert first.tokens.tolist() == [1, 2, 3, 4, 5]
        assert first.mask.dtype == np.uint8
        assert first.mask.tolist() == [0, 0, 1, 1, 1]
        assert first.logprobs is not None
        assert first.logprobs.dtype == np.float32
        assert first.logprobs.tolist() == [0, 0, -0.25, -0.5, -0.75]
        assert first.versions.tolist() == [-1, -1, 7, 7, 7]
        assert (first.reward, second.reward) == (0.0, 1.0)
        assert first.messages[-1] == {"role": "assistant", "content": "2"}
        assert (first.group_id, first.learn) == ("a", False)
        assert (first.trajectory, second.trajectory) == (0, 1)
        with pytest.raises(ValueError, match="read-only"):
            first.tokens[0] = 9


async def test_rows_that_others_posted_come_out_alike(api: Api) -> None:
    logprobs = [[1.0, -0.5, -0.25]] * 2
    overrides = [{"set_advantage_to_zero": True}]
    await api.post(
        "/scored_data", wire_group(2, 9, inference_logprobs=logprobs, overrides=overrides)
    )
    await api.post("/scored_data", wire_group(1, 8))
    async with EnvClient(api.url, run="run", batch_size=2) as client:
        batch = await client.lease()
        assert batch is not None
        cut_off, whole, bare = batch.rows
        assert cut_off.tokens.tolist() == [9, 5, 6]
        assert cut_off.mask.tolist() == [0, 1, 1]
        assert cut_off.logprobs is not None
        assert cut_off.logprobs.tolist() == [0.0, -0.5, -0.25]
        assert [row.learn for row in batch.rows] == [False, True, True]
        assert bare.logprobs is None
        assert bare.messages == []
        assert whole.reward == 0.5


async def test_batches_come_until_nothing_more_does(api: Api) -> None:
    await put(api, "a", "b", "c", "d", "e")
    seen = []
    async with EnvClient(api.url, run="run", batch_size=2) as client:
        async for batch in client.batches(idle_seconds=0.1):
            seen.append([group.group_id for group in batch.groups])
            await client.ack(batch)
        assert seen == [["a", "b"], ["c", "d"]]
        async for batch in client.batches(whole=False, idle_seconds=0.1):
            seen.append([group.group_id for group in batch.groups])
            await client.ack(batch)
        assert seen[2:] == [["e"]]
        assert (await client.status())["groups"]["acked"] == 5


async def test_what_is_given_back_comes_again(api: Api) -> None:
    await put(api, "a", "b")
    async with EnvClient(api.url, run="run", batch_size=1) as client:
        first = await client.lease()
        assert first is not None
        await client.nack(first)
        again = await client.lease()
        assert again is not None
        assert [group.group_id for group in again.groups] == ["a"]
        assert await client.extend(again, 900) > again.expires_at + 100
        with pytest.raises(ConflictError):
            await client.ack(first)


async def test_groups_are_read_without_being_consumed(api: Api) -> None:
    await put(api, "a", "b/c")

    def look() -> list[list[int]]:
        with SyncEnvClient(api.url, run="run", batch_size=2, retries=QUICK) as client:
            (first,) = client.list_groups(limit=1)
            (second,) = client.list_groups(after=first.seq)
            assert (first.group_id, first.tokens, first.state) == ("a", 10, "queued")
            assert client.list_groups(after=second.seq) == []
            rows = client.get_group(second.group_id).rows
            with pytest.raises(NotFoundError):
                client.get_group("none")
            assert client.lease() is not None
            return [row.tokens.tolist() for row in rows]

    assert await asyncio.to_thread(look) == [[1, 2, 3, 4, 5]] * 2


async def test_errors_have_types(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    client = EnvClient(api.url, run="unknown", retries=QUICK)
    with pytest.raises(NotFoundError, match="unknown"):
        await client.lease()
    with pytest.raises(InputError):
        await client.lease(wait_seconds=-1)
    await client.publish_policy_version(4)
    with pytest.raises(ConflictError, match="lower"):
        await client.publish_policy_version(3)

    async def lease(run: str, **wanted: object) -> None:
        raise StoreError("The disk is gone.")

    await put(api, "a")
    await client.register()
    monkeypatch.setattr(api.store, "lease", lease)
    with pytest.raises(StoreError, match="disk"):
        await client.lease(whole=False)
    await client.close()


async def test_a_server_that_is_not_there_is_asked_again(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match="3 tries"):
        async with EnvClient(f"http://127.0.0.1:{free_port()}", run="run", retries=QUICK):
            pass


async def test_passing_failures_are_repeated() -> None:
    answers = iter([503, httpx.ConnectError("gone"), httpx.ReadError("cut"), 200])

    def answer(request: httpx.Request) -> httpx.Response:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found, json={"version": 1, "detail": "busy"})

    transport = httpx.MockTransport(answer)
    retries = Retries(tries=4, first_pause_seconds=0.001)
    client = EnvClient("http://server", run="run", retries=retries, transport=transport)
    await client.publish_policy_version(1)
    assert next(answers, None) is None
    await client.close()


async def test_the_client_without_asyncio(api: Api) -> None:
    await put(api, "a", "b", "c")

    def train() -> list[list[str]]:
        seen = []
        with SyncEnvClient(api.url, run="run", batch_size=1) as client:
            for batch in client.batches(idle_seconds=0.1):
                assert len(batch.rows) == 2
                seen.append([group.group_id for group in batch.groups])
                client.ack(batch)
                client.publish_policy_version(len(seen))
            assert client.status()["policy_version"] == 3
            assert client.lease() is None
        return seen

    assert await asyncio.to_thread(train) == [["a"], ["b"], ["c"]]


async def test_a_group_that_cannot_be_used_is_set_aside_and_the_rest_acknowledged(
    api: Api,
) -> None:
    bad = GroupPut(
        group_id="bad", env="e", format="group", body=b"\x00", size=1, tokens=1, max_length=1
    )
    await api.store.put([bad])
    await put(api, "a", "b")
    async with EnvClient(api.url, run="run", batch_size=3) as client:
        batch = await client.lease()
        assert batch is not None
        assert [group.group_id for group in batch.groups] == ["bad", "a", "b"]
        for _ in range(2):
            await client.set_aside(batch, ["bad"], reason="unreadable")
        for group_ids, reason in (([], "x"), (["a"], "")):
            with pytest.raises(InputError):
                await client.set_aside(batch, group_ids, reason=reason)
        await put(api, "c")
        with pytest.raises(ConflictError):
            await client.set_aside(batch, ["a", "c"], reason="of another lease")
        assert (await client.status())["groups"] == {
            "buffered": 0, "queued": 1, "leased": 2, "acked": 0, "dropped": 1,
        }  # fmt: skip
        await client.ack(batch)
        with pytest.raises(ConflictError):
            await client.set_aside(batch, ["a"], reason="too late")
        rest = await client.lease(whole=False)
        assert rest is not None
        assert [group.group_id for group in rest.groups] == ["c"]
    assert (await api.store.counters())["set_aside: unreadable"] == 1


async def test_groups_that_cannot_be_read_are_named(api: Api) -> None:
    odd = {"env": "e", "size": 1, "tokens": 1, "max_length": 1}
    body = b'{"tokens":[[1]],"masks":[[1]],"scores":[1,2]}'
    large = b'{"tokens":[[2147483648]],"masks":[[-100]],"scores":[1]}'
    await api.store.put(
        [
            GroupPut(group_id="short", format="group", body=b"\x00", **odd),
            GroupPut(group_id="ragged", format="atropos", body=body, **odd),
            GroupPut(group_id="large", format="atropos", body=large, **odd),
        ]
    )
    async with EnvClient(api.url, run="run", batch_size=3) as client:
        batch = await client.lease()
    assert batch is not None
    for group in batch.groups:
        with pytest.raises(InputError, match=group.group_id):
            print(group.rows)
    with pytest.raises(InputError):
        decode_batch(b"no batch")
