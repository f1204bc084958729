"""The life of a trainer with the client: restarts, lost answers, slow training, tokens, memory."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envserver_clients.http
import httpx
import numpy as np
import pytest
from envserver_clients.http import EnvClient, NotAllowed, Retries, SyncEnvClient
from envserver_clients.records import decode_batch
from support.api import Api, native_group, put_native, running_api

from envserver import ConflictError, InputError, NotFoundError

QUICK = Retries(tries=5, first_pause_seconds=0.01)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db") as running:
        yield running


async def put(api: Api, *group_ids: str) -> None:
    for group_id in group_ids:
        await put_native(api.store, native_group(group_id))


class Killed(BaseException):
    """What ends a trainer that is killed."""


@dataclass
class Saved:
    name: str
    step: int
    lease_id: str


class Trainer:
    """Runs the example of `envserver_clients.http`, and dies where it is told to."""

    def __init__(self, url: str) -> None:
        _, _, behind = str(envserver_clients.http.__doc__).partition("started again:\n\n")
        lines = itertools.takewhile(lambda line: line[:1] in ("", " "), behind.splitlines())
        self._code = compile(textwrap.dedent("\n".join(lines)), "example", "exec")
        self._url = url
        self.saved: Saved | None = None
        self.learned: list[str] = []

    def live(self, *, steps: int, dies: str) -> None:
        """Trains until it dies: in training, when it has saved, or when it has acknowledged."""

        def due(where: str) -> None:
            if self._left == 0 and where == dies:
                raise Killed

        def train(rows: list[Any]) -> None:
            self._left -= 1
            due("training")
            assert all(row.tokens.dtype == np.int32 for row in rows)
            self._unsaved = [row.group_id for row in rows]

        def save_checkpoint(name: str, step: int, lease_id: str) -> None:
            self.learned += dict.fromkeys(self._unsaved)
            self.saved = Saved(name, step, lease_id)
            due("saved")

        class Client(SyncEnvClient):
            def publish_policy_version(self, version: int) -> None:
                super().publish_policy_version(version)
                due("acknowledged")

        self._left = steps
        scope = {"url": self._url, "load_checkpoint": lambda: self.saved, "train": train}
        scope |= {"save_checkpoint": save_checkpoint, "SyncEnvClient": Client}
        with pytest.raises(Killed):
            builtins.exec(self._code, scope)


async def test_the_example_learns_each_group_once_wherever_it_is_killed(api: Api) -> None:
    names = [f"g{number:03}" for number in range(16 * 5)]
    await asyncio.gather(*(put(api, name) for name in names))
    trainer = Trainer(api.url)
    for steps, dies in ((2, "saved"), (1, "training"), (1, "acknowledged"), (2, "saved")):
        await asyncio.to_thread(trainer.live, steps=steps, dies=dies)
    assert trainer.learned == names
    assert trainer.saved is not None
    assert trainer.saved.name == "step-5"
    status = await api.get("/v1/status")
    assert (status["policy_version"], status["groups"]["acked"]) == (4, 64)


class Unreliable(httpx.AsyncHTTPTransport):
    """Sends each request, or sends it twice, and loses every second answer."""

    def __init__(self) -> None:
        super().__init__()
        self._sent = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._sent += 1
        content = await request.aread()
        if self._sent % 2:
            copy = httpx.Request(
                request.method, request.url, headers=request.headers, content=content
            )
            answer = await super().handle_async_request(copy)
            await answer.aread()
            raise httpx.ReadError("lost on its way")
        return await super().handle_async_request(request)


async def test_lost_answers_and_repeated_requests_change_nothing(api: Api) -> None:
    await put(api, "a", "b", "c", "d")
    seen = []
    client = EnvClient(api.url, run="run", batch_size=1, transport=Unreliable(), retries=QUICK)
    async with client:
        for step in range(4):
            batch = await client.lease(wait_seconds=5)
            assert batch is not None
            seen += [group.group_id for group in batch.groups]
            await client.ack(batch, checkpoint=f"step-{step}")
        assert seen == ["a", "b", "c", "d"]
        await client.resume("step-2")
        again = await client.lease()
        assert again is not None
        assert [group.group_id for group in again.groups] == ["d"]
        await client.nack(again, reason="test")
    assert (await api.store.counts())["acked"] == 3


async def test_leases_are_kept_while_training_is_slow(api: Api) -> None:
    await put(api, "a", "b")
    async with EnvClient(api.url, run="run", batch_size=1, keep_leases_seconds=600) as keeping:
        kept = await keeping.lease(seconds=600)
        assert kept is not None
    async with EnvClient(api.url, run="run", batch_size=1, keep_leases_seconds=15) as client:
        batch = await client.lease(seconds=15)
        assert batch is not None
        while (await api.store.find_lease(batch.lease_id)).expires_at <= batch.expires_at:
            await asyncio.sleep(0.05)
        await client.ack(batch)
        with pytest.raises(ConflictError):
            await client.nack(batch)
        await client.ack(kept.lease_id)


async def test_runs_and_checkpoints(api: Api) -> None:
    await put(api, "a", "b", "c")
    async with EnvClient(api.url, run="run", batch_size=1, delivery="broadcast") as client:
        for name in ("one", None, "two"):
            batch = await client.lease()
            assert batch is not None
            await client.ack(batch, checkpoint=name)
        found = await client.checkpoints()
        assert [(one["name"], one["acked_groups"]) for one in found] == [("one", 1), ("two", 3)]
        assert (await client.resume(None))["redelivered"] == 3
        with pytest.raises(NotFoundError, match="none"):
            await client.resume("none")
        limited = await client.lease(whole=False, max_tokens=20)
        assert limited is not None
        assert [group.group_id for group in limited.groups] == ["a", "b"]
        assert await client.lease(max_staleness=0, environments=["code"]) is None
        await client.close_run()
        with pytest.raises(ConflictError, match="closed"):
            await client.lease()


@pytest.mark.parametrize("compress", [True, False])
async def test_arrays_are_views_of_what_came_over_the_wire(api: Api, compress: bool) -> None:
    await put_native(api.store, native_group("large", 50))
    answer = await api.http.get("/v1/status")
    async with EnvClient(api.url, run="run", batch_size=1, compress=compress) as client:
        batch = await client.lease()
        assert batch is not None
        (group,) = batch.groups
        body = np.frombuffer(group.body, np.uint8)
        for row in group.rows:
            for array in (row.tokens, row.mask, row.logprobs, row.versions):
                assert np.shares_memory(array, body)
        await client.nack(batch)
    answer = await api.http.post(
        "/v1/runs/run/lease",
        json={},
        headers={"accept": "application/vnd.envserver.groups+msgpack"},
    )
    content = answer.content
    tokens = decode_batch(content).rows[0].tokens
    assert np.shares_memory(tokens, np.frombuffer(content, np.uint8))


async def test_the_token_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        status = 200 if seen[-1] == "Bearer from-environment" else 401
        return httpx.Response(status, json={"detail": "A token is needed.", "version": 1})

    monkeypatch.setenv("ENVSERVER_TOKEN", "from-environment")
    for token in (None, "given", ""):
        client = EnvClient(
            "http://server", run="run", token=token, transport=httpx.MockTransport(answer)
        )
        if token is None:
            await client.publish_policy_version(1)
        else:
            with pytest.raises(NotAllowed, match="token"):
                await client.publish_policy_version(1)
        assert "given" not in repr(vars(client)) + repr(client)
        assert "from-environment" not in repr(vars(client)) + repr(client)
        await client.close()
    assert seen == ["Bearer from-environment", "Bearer given", None]


async def test_what_is_damaged_on_its_way_is_refused() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        stream = httpx.ByteStream(b"no zstd")
        return httpx.Response(200, headers={"content-encoding": "zstd"}, stream=Once(stream))

    client = EnvClient("http://server", run="run", transport=httpx.MockTransport(answer))
    with pytest.raises(InputError, match="damaged"):
        await client.lease()
    with pytest.raises(InputError, match="damaged"):
        await anext(client.stream())
    await client.close()


class Once(httpx.AsyncByteStream):
    """A body that comes over a connection."""

    def __init__(self, content: httpx.ByteStream) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._content:
            yield part
