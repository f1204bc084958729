"""The engine over HTTP: replicas, repetitions, typed errors, streams cut anywhere."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from envserver_records.errors import (
    ConfigError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from support.fake_vllm import FakeVllm, fake_vllm
from support.raw_server import chunked, head, raw_server
from support.waiting import until

from envserver import OpenAIConfig
from envserver.models import OpenAIEngine
from envserver.models.decoding import Decoder
from envserver.models.sse import SseParser

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
EXACT = {**ASK, "return_token_ids": True, "logprobs": True}


@asynccontextmanager
async def engine(
    *urls: str, tries: int = 4, key: str = "", **settings: Any
) -> AsyncIterator[OpenAIEngine]:
    config = OpenAIConfig(base_url=list(urls), api_key=SecretStr(key), **settings)
    async with OpenAIEngine(config, tries=tries, pause_seconds=0.01) as opened:
        yield opened


async def ask(opened: OpenAIEngine, rollout_id: str = "r", seconds: float = 60.0) -> dict[str, Any]:
    return await opened.post(CHAT, ASK, rollout_id=rollout_id, timeout_seconds=seconds)


async def stream(opened: OpenAIEngine, seconds: float = 60.0) -> list[dict[str, Any]]:
    body = {**EXACT, "stream": True}
    chunks = []
    async with opened.stream(CHAT, body, rollout_id="r", timeout_seconds=seconds) as streamed:
        async for chunk in streamed:
            chunks.append(chunk)
    return chunks


def dead_url() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# Addresses and names


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
async def test_the_address_may_or_may_not_end_in_v1(tail: str) -> None:
    async with fake_vllm() as fake, engine(fake.url + tail) as opened:
        assert (await ask(opened))["choices"][0]["message"]["content"] == "Hëllo."
        assert await opened.model_name() == "tiny"


async def test_addresses_may_be_separated_by_commas() -> None:
    async with fake_vllm() as one, fake_vllm() as two:
        config = OpenAIConfig(base_url=f"{one.url}/v1, {two.url}")
        async with OpenAIEngine(config) as opened:
            assert [r.base_url for r in await opened.health()] == [one.url, two.url]


def test_an_address_with_credentials_is_a_config_error_that_does_not_tell_them() -> None:
    with pytest.raises(ConfigError) as caught:
        OpenAIEngine(OpenAIConfig(base_url="http://user:pass@host/v1"))
    assert "pass" not in str(caught.value)


async def test_a_name_that_is_set_is_not_asked_for() -> None:
    async with engine(dead_url(), model_name="mine") as opened:
        assert await opened.model_name() == "mine"


async def test_an_engine_of_type_openai_is_not_exact() -> None:
    async with engine(dead_url(), server_type="openai") as opened:
        assert not opened.exact


# Replicas


async def test_a_rollout_stays_with_one_replica_and_rollouts_spread() -> None:
    async with fake_vllm() as one, fake_vllm() as two, engine(one.url, two.url) as opened:
        for _ in range(5):
            await ask(opened, "same")
        assert sorted([len(one.requests), len(two.requests)]) == [0, 5]
        for number in range(40):
            await ask(opened, f"rollout-{number}")
        assert min(len(one.requests), len(two.requests)) > 5


async def test_with_one_of_two_replicas_dead_every_call_is_answered() -> None:
    async with fake_vllm() as alive, engine(dead_url(), alive.url) as opened:
        await asyncio.gather(*(ask(opened, f"rollout-{number}") for number in range(40)))
        assert len(alive.requests) == 40
        assert [r.healthy for r in await opened.health()] == [False, True]


async def test_all_dead_is_unavailable() -> None:
    async with engine(dead_url(), dead_url()) as opened:
        with pytest.raises(EngineUnavailable, match="accepts no connection"):
            await ask(opened)


async def test_calls_in_flight_are_bounded_per_replica() -> None:
    held = asyncio.Event()
    async with (
        fake_vllm(held=held) as fake,
        engine(fake.url, num_max_requests_at_once=2) as opened,
    ):
        calls = [asyncio.create_task(ask(opened, str(number))) for number in range(5)]
        await until(lambda: len(fake.requests) == 2)
        await opened.get("/v1/models")
        assert len(fake.requests) == 2
        held.set()
        await asyncio.gather(*calls)
        assert len(fake.requests) == 5


# Repetitions and errors


@pytest.mark.parametrize("fault", [500, 502, 503, 429, 408, "close"])
async def test_passing_failures_are_repeated(fault: int | str) -> None:
    async with fake_vllm(faults=deque([fault, fault])) as fake, engine(fake.url) as opened:
        assert (await ask(opened))["choices"]
        assert len(fake.requests) == 3
        fake.faults.append(fault)
        assert len(await stream(opened)) > 2


@pytest.mark.parametrize(
    ("fault", "kind"), [(500, EngineError), (503, EngineUnavailable), (429, EngineUnavailable)]
)
async def test_lasting_failures_end_after_a_bounded_number_of_tries(
    fault: int, kind: type[EngineError]
) -> None:
    async with fake_vllm(faults=deque([fault] * 9)) as fake, engine(fake.url, tries=3) as opened:
        with pytest.raises(EngineError) as caught:
            await ask(opened)
        assert type(caught.value) is kind
        assert len(fake.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_is_not_repeated_and_tells_the_engines_words_without_the_key(
    status: int,
) -> None:
    secret = "sk-very-secret"
    async with (
        fake_vllm(faults=deque([status])) as fake,
        engine(fake.url, key=secret) as opened,
    ):
        with pytest.raises(EngineRefused, match=r"told Bearer \*\*\*") as caught:
            await ask(opened)
        assert caught.value.detail["status"] == status
        assert len(fake.requests) == 1
        assert fake.headers[0]["Authorization"] == f"Bearer {secret}"
        assert secret not in repr(caught.value.failure())


def test_of_many_models_the_nearest_ten_are_named() -> None:
    names = [f"org/other-{number}" for number in range(11)] + ["Qwen/Qwen3-8B", "Qwen/Qwen3-4B"]
    answer = {"data": [*({"id": name} for name in names), {"id": 1}, None]}
    hint = Decoder("").models_hint("qwen3-4b", answer)
    assert hint.startswith("The engine has Qwen/Qwen3-4B, Qwen/Qwen3-8B, org/other-")
    assert hint.endswith(" and 3 more: set openai.model_name.")
    assert hint.count(",") == 9
    assert Decoder("sk-key").models_hint("a", {"data": [{"id": "b-sk-key"}]}).count("b-***:")
    for data in (None, [], 3, [{"id": "qwen3-4b"}]):
        assert Decoder("").models_hint("qwen3-4b", {"data": data}) == ""


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("garbage", EngineGarbage), ("list", EngineGarbage), ("error_body", EngineError)],
)
async def test_an_answer_that_is_none_is_typed(fault: str, kind: type[EngineError]) -> None:
    async with fake_vllm(faults=deque([fault])) as fake, engine(fake.url) as opened:
        with pytest.raises(kind):
            await ask(opened)
        fake.faults.append(fault)
        with pytest.raises(kind):
            await stream(opened)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("cut", EngineGarbage), ("reset", EngineGarbage), ("error_chunk", EngineError)],
)
async def test_a_stream_that_breaks_off_is_typed_and_not_repeated(
    fault: str, kind: type[EngineError]
) -> None:
    async with fake_vllm(faults=deque([fault])) as fake, engine(fake.url) as opened:
        with pytest.raises(kind):
            await stream(opened)
        assert len(fake.requests) == 1


async def test_an_answer_without_a_stream_is_garbage() -> None:
    async with fake_vllm(faults=deque(["html_stream"])) as fake, engine(fake.url) as opened:
        with pytest.raises(EngineGarbage, match="without a stream"):
            await stream(opened)


async def test_a_slow_answer_times_out_and_is_aborted() -> None:
    async with fake_vllm(held=asyncio.Event()) as fake, engine(fake.url) as opened:
        with pytest.raises(EngineTimeout):
            await ask(opened, seconds=0.1)
        with pytest.raises(EngineTimeout):
            await stream(opened, seconds=0.1)
        await until(lambda: fake.aborted == 2)


async def test_an_error_of_the_consumer_leaves_a_stream_as_it_is() -> None:
    async with fake_vllm() as fake, engine(fake.url) as opened:
        with pytest.raises(ConnectionResetError, match="mine"):
            async with opened.stream(
                CHAT, {**ASK, "stream": True}, rollout_id="r", timeout_seconds=60
            ):
                raise ConnectionResetError("mine")


async def test_something_that_speaks_no_http_is_garbage() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server, engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as opened:
        with pytest.raises(EngineGarbage):
            await ask(opened)


async def test_a_server_without_models_says_so() -> None:
    app = web.Application()

    async def none(request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    app.router.add_get("/v1/models", none)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with engine(f"http://127.0.0.1:{runner.addresses[0][1]}") as opened:
        with pytest.raises(EngineGarbage, match="lists no model"):
            await opened.model_name()
    await runner.cleanup()


# Server-sent events


@pytest.mark.parametrize("cut_bytes", [1, 2, 7])
async def test_a_stream_cut_into_small_pieces_is_the_same(cut_bytes: int) -> None:
    async with fake_vllm() as fake, engine(fake.url) as opened:
        whole = await stream(opened)
        fake.cut_bytes = cut_bytes
        assert await stream(opened) == whole


@pytest.mark.parametrize("way", ["whole", "stream"])
async def test_a_call_whose_connection_is_reset_is_sent_again(way: str) -> None:
    async with raw_server() as raw, engine(raw.url) as opened:
        raw.end = "reset"
        call = asyncio.create_task(ask(opened) if way == "whole" else stream(opened))
        await until(lambda: raw.requests)
        body = b"data: [DONE]\n\n" if way == "stream" else b"{}"
        kind = "text/event-stream" if way == "stream" else "application/json"
        raw.pieces, raw.end = [head(kind, len(body)) + body], "keep"
        assert not await call


async def test_connections_are_used_again_after_streams() -> None:
    async with raw_server() as raw, engine(raw.url) as opened:
        start = head("text/event-stream", None, "transfer-encoding: chunked")
        end = chunked([b"data: [DONE]\n\n"])
        raw.pieces, raw.end = [start, end[:-5], b"", end[-5:]], "keep"
        for _ in range(5):
            assert await stream(opened) == []
        assert raw.accepted < 5


LINE = st.sampled_from(["data: a", "data:b", "data: ", "data", ": note", "event: x", "", "", "dat"])
END = st.sampled_from(["\n", "\r\n", "\r"])


@settings(deadline=None)
@given(
    lines=st.lists(st.tuples(LINE, END)),
    cuts=st.lists(st.integers(0, 80)),
    mark=st.booleans(),
)
def test_how_bytes_are_cut_never_changes_the_events(
    lines: list[tuple[str, str]], cuts: list[int], mark: bool
) -> None:
    text = ("\ufeff" if mark else "") + "".join(line + end for line, end in lines)
    data = text.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    parser = SseParser()
    got = []
    for start, end in itertools.pairwise(edges):
        got += parser.feed(data[start:end])
    assert got + parser.close() == oracle(text.removeprefix("\ufeff"))


def oracle(text: str) -> list[bytes]:
    """The events of a whole text, read the slow and obvious way."""
    events, data = [], []
    for line in [*text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""]:
        if line.partition(":")[0] == "data":
            data.append(line.partition(":")[2].removeprefix(" "))
        if not line and data:
            events.append("\n".join(data).encode())
            data = []
    return events


def test_an_event_without_end_is_garbage() -> None:
    parser = SseParser(max_event_bytes=100)
    with pytest.raises(EngineGarbage):
        for _ in range(20):
            parser.feed(b"data: xxxx")
    parser = SseParser(max_event_bytes=100)
    with pytest.raises(EngineGarbage):
        for _ in range(50):
            parser.feed(b"data: xxxx\n")


def test_the_fake_honours_max_tokens() -> None:
    assert len(FakeVllm().ids({**ASK, "max_tokens": 3})) == 3
