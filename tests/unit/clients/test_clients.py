"""The HTTP clients against a real server: batches, a trainer's life, retries, typed errors."""

import asyncio
import builtins
import itertools
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import envserver_clients.http
import httpx
import numpy as np
import pytest
from envserver_clients import learn
from envserver_clients.adapters.atropos import AtroposTrainerClient
from envserver_clients.http import EnvClient, NotAllowed, Retries, ServerUnreachable, SyncEnvClient
from envserver_clients.records import Batch, Row, decode_batch
from envserver_records import servers
from envserver_records.servers import AsyncServersClient, ServersClient, proxy_of
from rich.console import Console
from support.api import Api, native_group, put_native, wire_group
from support.cases import cases_of
from support.commands import free_port
from support.doors import Door, State, doors
from support.waiting import until

from envserver import ConfigError, ConflictError, InputError, NotFoundError, StoreError
from envserver.export.stored_sources import open_source
from envserver.proxy.gate import Gate
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
    posted = {"inference_logprobs": [[1.0, -0.5, -0.25]] * 2}
    posted |= {"overrides": [{"set_advantage_to_zero": True}]}
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


async def test_what_is_given_back_comes_again_and_a_run_resumes_its_checkpoints(api: Api) -> None:
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
    with pytest.raises(ServerUnreachable, match=r"3 tries: http://127\.0\.0\.1"):
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


def test_two_commands_that_start_together_make_the_tiny_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(words: list[str], *, check: bool) -> Mock:
        folder = Path(words[5])
        if folder.exists():
            return Mock(returncode=1)
        made.append(folder)
        both_are_there.wait()  # the other one waits for the lock, or makes it, too
        folder.mkdir()
        (folder / "config.json").touch()
        return Mock(returncode=0)

    class Ready(Exception):
        pass

    def learns(name: str) -> None:
        if name == "two":
            threading.Timer(0.5, both_are_there.set).start()
        with pytest.raises(Ready):
            learn.learn(learn.LearnSettings(output=tmp_path / name), Console(quiet=True))

    both_are_there = threading.Event()
    monkeypatch.setattr(learn.subprocess, "run", make)
    monkeypatch.setattr(learn, "Children", Mock(side_effect=Ready))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(learns, ("one", "two")))
    assert len(made) == 1


# Proxies of the environment

OUTSIDE = "http://server.example:8000"


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for kind in ("http", "https", "all", "no"):
        for name in (f"{kind}_proxy", f"{kind}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("variables", "url", "proxy"), cases_of(__file__)["proxies"])
def test_which_requests_take_a_proxy(
    no_proxy: pytest.MonkeyPatch, variables: dict[str, str], url: str, proxy: str
) -> None:
    for name, value in variables.items():
        no_proxy.setenv(name, value)
    assert proxy_of(url) == (proxy or None)


@pytest.mark.parametrize("proxy", ["http://u:secret@127.0.0.1:{port}", "socks5://127.0.0.1:{port}"])
async def test_a_server_of_this_machine_needs_no_proxy(
    api: Api, no_proxy: pytest.MonkeyPatch, proxy: str
) -> None:
    no_proxy.setenv("ALL_PROXY", proxy.format(port=free_port()))
    async with EnvClient(api.url, run="r", retries=QUICK):
        pass
    with pytest.raises((ServerUnreachable, ConfigError), match="proxy") as failed:
        async with EnvClient(OUTSIDE, run="r", retries=QUICK):
            pass
    assert "127.0.0.1" in str(failed.value) and "secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("200 OK\r\ncontent-type: application/json", "GET http://server.example:8000/v1/x"),
        ("407 Who\r\ncontent-type: text/html", "HTTP 407 (through the proxy http://127.0.0.1"),
        ("503 Busy\r\ncontent-type: application/json", "GET http://server.example:8000/v1/x"),
    ],
)
async def test_a_proxy_carries_requests(
    no_proxy: pytest.MonkeyPatch, head: str, expected: str
) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readuntil(b"\r\n\r\n")).partition(b" HTTP")[0]
        writer.write(f"HTTP/1.1 {head}\r\ncontent-length: {len(line)}\r\n\r\n".encode() + line)
        writer.close()

    def ask() -> str:
        with ServersClient(OUTSIDE) as http:
            return http.get("/v1/x").text

    async with await asyncio.start_server(carry, "127.0.0.1") as proxy:
        no_proxy.setenv("HTTP_PROXY", f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        async with AsyncServersClient(OUTSIDE) as http:
            asked = (asyncio.to_thread(ask), http.get("/v1/x"))
            answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            assert expected in (answer.text if isinstance(answer, httpx.Response) else str(answer))


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
        return httpx.Response(status, json={"detail": "An access token is required.", "version": 1})

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


# A trainer on the Atropos API


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


# Clients that were given several URLs: one server fails in any way, and they go on at another


@pytest.fixture
async def two(api: Api) -> AsyncIterator[list[Door]]:
    async with doors(api.url) as made:
        yield made


def urls(two: list[Door]) -> list[str]:
    return [door.url for door in two]


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
async def test_blocking_clients_go_on(wire: str, state: State, api: Api, two: list[Door]) -> None:
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
