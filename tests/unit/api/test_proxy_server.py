"""The proxy's sockets: bounds of connections, bytes and requests for each attempt."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.fake_vllm import fake_vllm
from support.serving import attempt_spec
from support.waiting import PATIENCE, until

from envserver import OpenAIConfig, ServerConfig
from envserver.api.access.connections import HttpBounds
from envserver.api.proxy_server import ProxyServer, serve_proxy
from envserver.models import OpenAIEngine
from envserver.proxy import Proxy, ProxyAttempt
from envserver.proxy.bounds import AttemptBounds

CHAT, MESSAGES = "v1/chat/completions", "v1/messages"


class House:
    """A proxy with one service, which answers when `go` is set."""

    def __init__(self, engine: Any, **bounds: float) -> None:
        self.go = asyncio.Event()
        self.asked = 0
        self.clients: list[Client] = []
        """All of them, open to the end: an unused writer closes its connection."""
        self.proxy = Proxy(
            engine,
            services={"wait": self._wait},
            bounds=AttemptBounds(**bounds),  # type: ignore[arg-type]
        )
        self.server: ProxyServer = None  # type: ignore[assignment]

    async def _wait(self, arguments: Any, caller: Any) -> str:
        self.asked += 1
        await self.go.wait()
        return "done"

    def open(self) -> ProxyAttempt:
        return self.proxy.open(attempt_spec())

    async def connect(self, sent: bytes = b"", port: int = 0) -> Client:
        port = port or self.server.port
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.writer.write(sent)
        self.clients.append(client)
        return client

    async def get(self, attempt: ProxyAttempt, path: str = "v1/models") -> tuple[int, Any]:
        client = await self.connect(head(attempt, "GET", path))
        return await client.answer()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, Any]:
        """Status and JSON of the next answer."""
        async with asyncio.timeout(PATIENCE):
            start = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(start.partition("content-length: ")[2].partition("\r\n")[0])
            body = await self.reader.readexactly(length)
        self.head = start
        return int(start.split(" ", 2)[1]), json.loads(body)

    async def is_closed(self) -> bool:
        """Whether the server closes it without another word."""
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read() == b""
        return True


def head(
    attempt: ProxyAttempt | None, method: str, path: str, length: int = 0, more: str = ""
) -> bytes:
    key = attempt.key if attempt is not None else "unknown"
    text = f"{method} /r/{key}/{path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n{more}\r\n"
    return text.encode()


@asynccontextmanager
async def house(http: HttpBounds | None = None, **bounds: float) -> AsyncIterator[House]:
    async with OpenAIEngine(OpenAIConfig(base_url="http://127.0.0.1:9")) as dead:
        made = House(dead, **bounds)
        made.server = await serve_proxy(made.proxy, http)
        try:
            yield made
        finally:
            made.go.set()
            await made.server.close()


@pytest.mark.parametrize("beginning", [b"/r/", b"/%72/", b"/r%2f", b"/any/r/"])
async def test_every_way_to_write_a_path_counts(beginning: bytes) -> None:
    async with house(max_connections=2) as made:
        asks = head(made.open(), "POST", "tools/wait", 2).replace(b"/r/", beginning) + b"{}"
        for number in (1, 2):
            await made.connect(asks)
            await until(lambda most=number: made.asked == most)  # type: ignore[misc]
        status, told = await (await made.connect(asks)).answer()
        assert (status, told["error"]["code"]) == (429, "over_bound")


async def test_the_longest_unused_connection_of_an_attempt_goes() -> None:
    async with house(max_connections=3) as made:
        mine, other = made.open(), made.open()
        theirs = await made.connect(head(other, "POST", CHAT, 10))
        busy = await made.connect(head(mine, "POST", "tools/wait", 2) + b"{}")
        await until(lambda: made.asked == 1)
        half = await made.connect(head(mine, "POST", CHAT, 10) + b"{")
        idle = await made.connect(head(mine, "GET", "v1/models"))
        assert (await idle.answer())[0] == 200
        # `half` is the oldest that is not being answered, then `idle`.
        assert (await made.get(mine))[0] == 200
        status, told = await half.answer()
        assert (status, told["error"]["code"]) == (429, "over_bound")
        assert (await made.get(mine))[0] == 200
        assert await idle.is_closed()
        made.go.set()
        assert (await busy.answer())[0] == 200
        theirs.writer.write(b"x" * 10)
        assert (await theirs.answer())[0] == 400  # it was never closed
        assert made.proxy.totals.refused["connections"] == 2
        assert (mine.flags, other.flags) == ({"over_bound"}, set())


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "over_bound"), ("v1/responses", "over_bound"), (MESSAGES, None)]
)
async def test_what_is_refused_is_told_in_the_dialect(path: str, kind: str | None) -> None:
    async with house(max_connections=2) as made:
        attempt = made.open()
        for _ in range(2):
            await made.connect(head(attempt, "POST", "tools/wait", 2) + b"{}")
        await until(lambda: made.asked == 2)
        client = await made.connect(head(attempt, "POST", path, 2) + b"{}")
        status, told = await client.answer()
        assert status == 429
        if kind is None:
            assert told["error"]["type"] == "rate_limit_error"
        else:
            assert told["error"]["code"] == kind
        assert "x-should-retry: true" in client.head and "retry-after: 1" in client.head
        assert await client.is_closed()


async def test_a_connection_counts_for_the_attempt_that_asked_last() -> None:
    async with house(max_connections=2) as made:
        one, another = made.open(), made.open()
        shared = await made.connect(head(one, "GET", "v1/models"))
        assert (await shared.answer())[0] == 200
        shared.writer.write(head(another, "GET", "v1/models"))
        assert (await shared.answer())[0] == 200
        assert (len(one.in_flight.connections), len(another.in_flight.connections)) == (0, 1)
        shared.writer.close()
        await until(lambda: not made.proxy.totals.connections)
        assert len(another.in_flight.connections) == 0


async def test_a_workers_own_socket_holds_few_connections_without_a_key() -> None:
    async with house(max_connections=3) as made:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        port = listener.getsockname()[1]
        place = await made.server.serve_worker(listener)
        silent = [await made.connect(b"GET /r/", port) for _ in range(3)]
        attempt = made.open()
        client = await made.connect(head(attempt, "GET", "v1/models"), port)
        assert (await client.answer())[0] == 200
        assert (await silent[0].answer())[0] == 429
        assert made.proxy.totals.connections == 3
        place.close()


async def test_bytes_of_an_attempt_are_bounded_together_and_given_back() -> None:
    async with house(max_request_mb=10) as made:
        mine, other = made.open(), made.open()
        half = await made.connect(head(mine, "POST", CHAT, 8_000_000) + b" " * 100)
        await until(lambda: mine.in_flight.bytes == 8_000_000)
        # As it was declared, as it comes, and as it is inflated.
        declared = await made.connect(head(mine, "POST", CHAT, 3_000_000))
        assert (await declared.answer())[0] == 429
        chunked = head(mine, "POST", CHAT).replace(
            b"content-length: 0", b"transfer-encoding: chunked"
        )
        growing = await made.connect(chunked + b"%x\r\n" % 3_000_000 + b" " * 3_000_000)
        assert (await growing.answer())[0] == 429
        bomb = gzip.compress(b" " * 3_000_000)
        inflated = head(mine, "POST", CHAT, len(bomb), "content-encoding: gzip\r\n")
        assert (await (await made.connect(inflated + bomb)).answer())[0] == 429
        # Others are not concerned, and neither is what is small enough.
        big = head(other, "POST", CHAT, 3_000_000) + b" " * 3_000_000
        assert (await (await made.connect(big)).answer())[0] == 400
        assert (await (await made.connect(head(mine, "POST", CHAT, 2) + b"no")).answer())[0] == 400
        half.writer.close()
        await until(lambda: made.proxy.totals.bytes == 0)
        again = await made.connect(head(mine, "POST", CHAT, 3_000_000) + b" " * 3_000_000)
        assert (await again.answer())[0] == 400
        assert made.proxy.totals.refused["bytes"] == 3


async def test_a_body_of_millions_of_tiny_values_is_not_parsed() -> None:
    async with house() as made:
        attempt = made.open()
        tiny = b'{"output":[' + b"1," * 2_500_000 + b"1]}"
        for path in (CHAT, MESSAGES, "tools/wait", "result"):
            client = await made.connect(head(attempt, "POST", path, len(tiny)) + tiny)
            assert (await client.answer())[0] == 413, path
        assert (attempt.output, attempt.flags) == (None, {"result_cut_off"})


async def test_a_body_that_alone_is_over_the_bound_is_too_large() -> None:
    """Trying again would not help."""
    async with house(max_request_mb=2) as made:
        client = await made.connect(head(made.open(), "POST", CHAT, 2_000_001))
        assert (await client.answer())[0] == 413


async def test_all_attempts_together_are_bounded_and_each_keeps_a_little() -> None:
    async with house(max_request_mb=10) as made:
        greedy = [made.open() for _ in range(8)]
        for one in greedy:
            await made.connect(head(one, "POST", CHAT, 10_000_000))
        await until(lambda: made.proxy.totals.bytes == 80_000_000)
        late = made.open()
        large = await made.connect(head(late, "POST", CHAT, 9_000_000))
        assert (await large.answer())[0] == 429
        small = await made.connect(head(late, "POST", CHAT, 3_000_000) + b" " * 3_000_000)
        assert (await small.answer())[0] == 400


async def test_requests_wait_their_turn_and_a_flood_is_refused() -> None:
    async with house(max_requests_per_second=20, max_connections=1000) as made:
        attempt = made.open()
        told = await asyncio.gather(*(made.get(attempt) for _ in range(230)))
        statuses = [status for status, _ in told]
        assert 200 < statuses.count(200) < 230  # the burst, and those that could wait
        assert statuses.count(429) == 230 - statuses.count(200)
        assert made.proxy.totals.refused["requests"] == statuses.count(429)
        # Its result is taken all the same.
        result = b'{"output": 1}'
        client = await made.connect(head(attempt, "POST", "result", len(result)) + result)
        assert b"204" in await client.reader.readuntil(b"\r\n\r\n")
        assert attempt.output == 1


async def test_unknown_keys_have_a_rate_together() -> None:
    async with house(max_requests_per_second=2) as made:
        clients = [await made.connect(head(None, "GET", "v1/models")) for _ in range(60)]
        statuses = [(await client.answer())[0] for client in clients]
        assert set(statuses) == {404, 429}
        assert (await made.get(made.open()))[0] == 200


async def test_what_is_sent_before_the_answers_is_bounded() -> None:
    async with house() as made:
        attempt = made.open()
        asked = head(attempt, "POST", "tools/wait", 2) + b"{}"
        client = await made.connect(asked * 100)
        assert await client.is_closed()
        assert made.asked <= 1


async def test_heads_and_bodies_that_stop_are_closed() -> None:
    usual = HttpBounds.of(ServerConfig())
    short = dataclasses.replace(usual, header_seconds=0.2, body_idle_seconds=0.2)
    async with house(short) as made:
        attempt = made.open()
        for sent in (b"POST /r/", head(attempt, "POST", MESSAGES, 10) + b"{"):
            assert (await (await made.connect(sent)).answer())[0] == 408
        assert await (await made.connect()).is_closed()
        assert made.proxy.totals.refused["idle"] == 2
        assert attempt.flags == set()  # a paused machine looks the same


async def test_guests_have_no_bounds() -> None:
    async with house(max_connections=2, max_requests_per_second=1) as made:
        key = made.proxy.open_guest()
        sent = f"POST /r/{key}/v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n"
        held = [await made.connect(sent.encode()) for _ in range(20)]
        for client in held:
            client.writer.write(b"x" * 9)
        assert {(await client.answer())[0] for client in held} != {429}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_hangs_up_is_noticed_at_once(streamed: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": streamed})
    async with (
        fake_vllm() as fake,
        OpenAIEngine(OpenAIConfig(base_url=fake.url, model_name="any")) as engine,
    ):
        made = House(engine)
        made.server = await serve_proxy(made.proxy)
        try:
            fake.held = asyncio.Event()
            attempt = made.open()
            asked = head(attempt, "POST", CHAT, len(body)) + body.encode()
            client = await made.connect(asked)
            await until(lambda: fake.requests)
            client.writer.close()
            await until(lambda: not attempt.in_flight.bytes)  # nobody waits for the answer
            if streamed:
                await until(lambda: fake.aborted == 1)
                assert [call.finish_reason for call in attempt.calls] == ["disconnect"]
                return
            assert attempt.calls == []
            fake.held.set()
            await until(lambda: attempt.calls)
            assert attempt.calls[0].exact and attempt.calls[0].delivered == "none"
            # An equal request is the same client, which asks again for what it lost.
            assert (await (await made.connect(asked)).answer())[0] == 200
            assert len(attempt.calls) == 1 and attempt.calls[0].delivered == "full"
        finally:
            await made.server.close()
