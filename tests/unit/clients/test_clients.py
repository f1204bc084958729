"""The HTTP clients against a real server: batches, a trainer's life, retries, typed errors."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import textwrap
from dataclasses import dataclass
from typing import Any

import envserver_clients.http
import httpx
import numpy as np
import pytest
from envserver_clients.adapters.atropos import AtroposTrainerClient
from envserver_clients.http import EnvClient, NotAllowed, Retries, ServerUnreachable, SyncEnvClient
from envserver_clients.records import Batch, Row, decode_batch
from support.api import Api, native_group, put_native, wire_group
from support.commands import free_port

from envserver import ConflictError, InputError, NotFoundError, StoreError
from envserver.store import GroupPut

QUICK = Retries(tries=3, first_pause_seconds=0.01)


async def leased(client: EnvClient, **how: Any) -> Batch:
    batch = await client.lease(**how)
    assert batch is not None
    return batch


def ids(batch: Batch) -> list[str]:
    return [group.group_id for group in batch.groups]


def told(row: Row) -> list[object]:
    logprobs = None if row.logprobs is None else row.logprobs.tolist()
    return [row.tokens.tolist(), row.mask.tolist(), logprobs, row.reward, row.learn]


async def test_rows_are_the_arrays_that_were_stored_or_posted(api: Api) -> None:
    await put_native(api.store, native_group("a", truncated=True))
    posted = {
        "inference_logprobs": [[1.0, -0.5, -0.25]] * 2,
        "overrides": [{"set_advantage_to_zero": True}],
    }
    await api.post("/scored_data", wire_group(2, 9, **posted))
    await api.post("/scored_data", wire_group(1, 8))
    async with EnvClient(api.url, run="run", batch_size=3) as client:
        batch = await leased(client)
    own = batch.groups[0]
    assert (own.group_id, own.env, own.policy_version) == ("a", "math", 7)
    first, second, cut_off, whole, bare = batch.rows
    assert first.logprobs is not None
    kinds = [first.tokens.dtype, first.mask.dtype, first.logprobs.dtype]
    assert kinds == [np.int32, np.uint8, np.float32]

    assert told(first) == [[1, 2, 3, 4, 5], [0, 0, 1, 1, 1], [0, 0, -0.25, -0.5, -0.75], 0.0, False]
    assert first.versions.tolist() == [-1, -1, 7, 7, 7]
    assert (second.reward, whole.reward, whole.learn) == (1.0, 0.5, True)
    assert first.messages[-1] == {"role": "assistant", "content": "2"}
    assert (first.group_id, first.trajectory, second.trajectory) == ("a", 0, 1)
    with pytest.raises(ValueError, match="read-only"):
        first.tokens[0] = 9
    assert told(cut_off) == [[9, 5, 6], [0, 1, 1], [0.0, -0.5, -0.25], 0.5, False]
    assert (bare.logprobs, bare.messages) == (None, [])


async def test_the_client_without_asyncio_reads_and_trains(api: Api) -> None:
    await api.put("a", "b/c", "d")

    def train() -> list[list[str]]:
        seen = []
        with SyncEnvClient(api.url, run="run", batch_size=1, retries=QUICK) as client:
            (first,) = client.list_groups(limit=1)
            assert (first.group_id, first.tokens, first.state) == ("a", 10, "queued")
            second, third = client.list_groups(after=first.seq)
            assert client.list_groups(after=third.seq) == []
            rows = client.get_group(second.group_id).rows
            assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4, 5]] * 2
            with pytest.raises(NotFoundError):
                client.get_group("none")
            for batch in client.batches(idle_seconds=0.1):  # what was read is still there
                assert len(batch.rows) == 2
                seen.append(ids(batch))
                client.ack(batch)
                client.publish_policy_version(len(seen))
            assert client.status()["policy_version"] == 3
            assert client.lease() is None
        return seen

    assert await asyncio.to_thread(train) == [["a"], ["b/c"], ["d"]]


async def test_what_is_given_back_comes_again_and_a_run_goes_back_to_its_checkpoints(
    api: Api,
) -> None:
    await api.put("a", "b", "c")
    async with EnvClient(api.url, run="run", batch_size=1, delivery="broadcast") as client:
        first = await leased(client)
        await client.nack(first)
        batch = await leased(client)
        assert ids(batch) == ["a"]
        assert await client.extend(batch, 900) > batch.expires_at + 100
        with pytest.raises(ConflictError):
            await client.ack(first)
        for name in ("one", None, "two"):
            await client.ack(batch, checkpoint=name)
            batch = await client.lease() or batch
        found = await client.checkpoints()
        assert [(one["name"], one["acked_groups"]) for one in found] == [("one", 1), ("two", 3)]
        assert (await client.resume(None))["redelivered"] == 3
        assert ids(await leased(client, whole=False, max_tokens=20)) == ["a", "b"]
        await client.close_run()
        with pytest.raises(ConflictError, match="closed"):
            await client.lease()


async def test_errors_have_types(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    client = EnvClient(api.url, run="unknown", retries=QUICK)
    with pytest.raises(NotFoundError, match="unknown"):
        await client.lease()
    await client.publish_policy_version(4)
    with pytest.raises(ConflictError, match="lower"):
        await client.publish_policy_version(3)

    async def lease(run: str, **wanted: object) -> None:
        raise StoreError("The disk is gone.")

    await api.put("a")
    await client.register()
    monkeypatch.setattr(api.store, "lease", lease)
    with pytest.raises(StoreError, match="disk"):
        await client.lease(whole=False)
    await client.close()


async def test_a_server_that_fails_is_asked_again() -> None:
    with pytest.raises(ServerUnreachable, match="3 tries"):
        async with EnvClient(f"http://127.0.0.1:{free_port()}", run="run", retries=QUICK):
            pass
    answers = iter([503, httpx.ConnectError("gone"), httpx.ReadError("cut"), 200])

    def answer(request: httpx.Request) -> httpx.Response:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found, json={"version": 1, "detail": "busy"})

    patient = Retries(tries=4, first_pause_seconds=0.001)
    wire = httpx.MockTransport(answer)
    client = EnvClient("http://server", run="run", retries=patient, transport=wire)
    await client.publish_policy_version(1)
    assert next(answers, None) is None
    await client.close()


async def test_a_group_that_cannot_be_used_is_set_aside_and_the_rest_acknowledged(api: Api) -> None:
    bad = GroupPut(
        group_id="bad", env="e", format="group", body=b"\x00", size=1, tokens=1, max_length=1
    )
    await api.store.put([bad])
    await api.put("a", "b")
    async with EnvClient(api.url, run="run", batch_size=3) as client:
        batch = await leased(client)
        assert ids(batch) == ["bad", "a", "b"]
        for _ in range(2):
            await client.set_aside(batch, ["bad"], reason="unreadable")
        await api.put("c")
        with pytest.raises(ConflictError):
            await client.set_aside(batch, ["a", "c"], reason="of another lease")
        assert (await client.status())["groups"] == {
            "buffered": 0, "queued": 1, "leased": 2, "acked": 0, "dropped": 1,
        }  # fmt: skip
        await client.ack(batch)
        assert ids(await leased(client, whole=False)) == ["c"]
    assert (await api.store.counters())["set_aside: unreadable"] == 1


async def test_groups_that_cannot_be_read_are_named(api: Api) -> None:
    bodies = {
        "short": ("group", b"\x00"),
        "ragged": ("atropos", b'{"tokens":[[1]],"masks":[[1]],"scores":[1,2]}'),
        "large": ("atropos", b'{"tokens":[[2147483648]],"masks":[[-100]],"scores":[1]}'),
    }
    odd = {"env": "e", "size": 1, "tokens": 1, "max_length": 1}
    await api.store.put(
        [
            GroupPut(group_id=name, format=form, body=body, **odd)
            for name, (form, body) in bodies.items()
        ]
    )
    async with EnvClient(api.url, run="run", batch_size=3) as client:
        batch = await leased(client)
    for group in batch.groups:
        with pytest.raises(InputError, match=group.group_id):
            print(group.rows)
    with pytest.raises(InputError):
        decode_batch(b"no batch")


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
    await asyncio.gather(*(api.put(name) for name in names))
    trainer = Trainer(api.url)
    for steps, dies in ((2, "saved"), (1, "training"), (1, "acknowledged"), (2, "saved")):
        await asyncio.to_thread(trainer.live, steps=steps, dies=dies)
    assert trainer.learned == names
    assert trainer.saved is not None
    assert trainer.saved.name == "step-5"
    status = await api.get("/v1/status")
    assert (status["policy_version"], status["groups"]["acked"]) == (4, 64)


async def test_leases_are_kept_while_training_is_slow(api: Api) -> None:
    await api.put("a", "b")
    async with EnvClient(api.url, run="run", batch_size=1, keep_leases_seconds=600) as keeping:
        kept = await leased(keeping, seconds=600)
    async with EnvClient(api.url, run="run", batch_size=1, keep_leases_seconds=15) as client:
        batch = await leased(client, seconds=15)
        while (await api.store.find_lease(batch.lease_id)).expires_at <= batch.expires_at:
            await asyncio.sleep(0.05)
        await client.ack(batch)
        with pytest.raises(ConflictError):
            await client.nack(batch)
        await client.ack(kept.lease_id)


async def test_the_token_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        status = 200 if seen[-1] == "Bearer from-environment" else 401
        return httpx.Response(status, json={"detail": "A token is needed.", "version": 1})

    monkeypatch.setenv("ENVSERVER_TOKEN", "from-environment")
    wire = httpx.MockTransport(answer)
    for token in (None, "given", ""):
        client = EnvClient("http://server", run="run", token=token, transport=wire)
        if token is None:
            await client.publish_policy_version(1)
        else:
            with pytest.raises(NotAllowed, match="token"):
                await client.publish_policy_version(1)
        shown = repr(vars(client)) + repr(client)
        assert "given" not in shown and "from-environment" not in shown
        await client.close()
    assert seen == ["Bearer from-environment", "Bearer given", None]


# A trainer on the Atropos wire


async def batches(api: Api, size: int) -> list[Batch]:
    def loop() -> list[Batch]:
        with AtroposTrainerClient(api.url, group_size=2, batch_size=size) as trainer:
            return list(trainer.batches(idle_seconds=0.3))

    return await asyncio.to_thread(loop)


async def test_rows_of_the_atropos_wire_are_those_of_the_native_client(api: Api) -> None:
    await put_native(api.store, native_group("a", truncated=True))
    await api.put("b")
    async with EnvClient(api.url, run="all", batch_size=2, delivery="broadcast") as client:
        native = await leased(client, whole=False)
        (batch,) = await batches(api, 2)
    assert len(batch.groups) == 2
    assert [told(row) for row in batch.rows] == [told(row) for row in native.rows]
    assert {row.versions[-1] for row in batch.rows} == {-1}
