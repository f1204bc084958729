"""The proxy's sockets: bounds of connections, bytes and requests for each attempt."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.serving import attempt_spec
from support.waiting import PATIENCE, until

from envserver import OpenAIConfig
from envserver.http.proxy_server import ProxyServer, serve_proxy
from envserver.models.openai import OpenAIEngine
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.bounds import AttemptBounds
from envserver.proxy.server import Proxy

CHAT, MESSAGES = "v1/chat/completions", "v1/messages"


class House:
    """A proxy with one service, which answers when `go` is set."""

    server: ProxyServer

    def __init__(self, engine: Any, **bounds: float) -> None:
        self.go = asyncio.Event()
        self.asked = 0
        self.clients: list[Client] = []
        """All of them, open to the end: an unused writer closes its connection."""
        limits: Any = bounds
        self.proxy = Proxy(engine, services={"wait": self._wait}, bounds=AttemptBounds(**limits))

    async def _wait(self, arguments: Any, caller: Any) -> str:
        self.asked += 1
        await self.go.wait()
        return "done"

    def open(self) -> ProxyAttempt:
        return self.proxy.open(attempt_spec())

    async def connect(self, sent: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.server.port))
        client.writer.write(sent)
        self.clients.append(client)
        return client

    async def post(
        self, attempt: ProxyAttempt, path: str, body: bytes = b"{}", length: int = 0
    ) -> Client:
        """A connection that has sent `body`, and said that so many bytes come."""
        return await self.connect(head(attempt, "POST", path, length or len(body)) + body)

    async def get(self, attempt: ProxyAttempt) -> Client:
        return await self.connect(head(attempt, "GET", "v1/models"))

    async def wait(self, attempt: ProxyAttempt) -> Client:
        """A connection that is being answered by the service."""
        asked = self.asked
        client = await self.post(attempt, "tools/wait")
        await until(lambda: self.asked > asked)
        return client


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.told: Any = None

    async def status(self) -> int:
        """Status of the next answer; its JSON is `told`."""
        async with asyncio.timeout(PATIENCE):
            self.head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(self.head.partition("content-length: ")[2].partition("\r\n")[0])
            self.told = json.loads(await self.reader.readexactly(length))
        return int(self.head.split(" ", 2)[1])

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
async def house(**bounds: float) -> AsyncIterator[House]:
    async with OpenAIEngine(OpenAIConfig(base_url="http://127.0.0.1:9")) as dead:
        made = House(dead, **bounds)
        made.server = await serve_proxy(made.proxy)
        try:
            yield made
        finally:
            made.go.set()
            await made.server.close()


# Connections


@pytest.mark.parametrize("beginning", [b"/r/", b"/%72/", b"/r%2f", b"/any/r/"])
async def test_every_way_to_write_a_path_counts(beginning: bytes) -> None:
    async with house(max_connections=2) as made:
        asks = head(made.open(), "POST", "tools/wait", 2).replace(b"/r/", beginning) + b"{}"
        for number in (1, 2):
            await made.connect(asks)
            await until(lambda most=number: made.asked == most)  # type: ignore[misc]
        client = await made.connect(asks)
        assert (await client.status(), client.told["error"]["code"]) == (429, "over_bound")


async def test_the_longest_unused_connection_of_an_attempt_goes() -> None:
    async with house(max_connections=3) as made:
        mine, other = made.open(), made.open()
        theirs = await made.post(other, CHAT, b"", 10)
        busy = await made.wait(mine)
        half = await made.post(mine, CHAT, b"{", 10)
        idle = await made.get(mine)
        assert await idle.status() == 200
        # `half` is the oldest that is not being answered, then `idle`.
        assert await (await made.get(mine)).status() == 200
        assert (await half.status(), half.told["error"]["code"]) == (429, "over_bound")
        assert await (await made.get(mine)).status() == 200
        assert await idle.is_closed()
        made.go.set()
        assert await busy.status() == 200
        theirs.writer.write(b"x" * 10)
        assert await theirs.status() == 400  # it was never closed
        assert made.proxy.totals.refused["connections"] == 2
        assert (mine.flags, other.flags) == ({"over_bound"}, set())


async def test_a_connection_counts_for_the_attempt_that_asked_last() -> None:
    async with house(max_connections=2) as made:
        one, another = made.open(), made.open()
        shared = await made.get(one)
        assert await shared.status() == 200
        shared.writer.write(head(another, "GET", "v1/models"))
        assert await shared.status() == 200
        assert (len(one.in_flight.connections), len(another.in_flight.connections)) == (0, 1)
        shared.writer.close()
        await until(lambda: not made.proxy.totals.connections)
        assert len(another.in_flight.connections) == 0


# Bytes


async def test_bytes_of_an_attempt_are_bounded_together_and_given_back() -> None:
    large = b" " * 3_000_000
    async with house(max_request_mb=10) as made:
        mine, other = made.open(), made.open()
        half = await made.post(mine, CHAT, b" " * 100, 8_000_000)
        await until(lambda: mine.in_flight.bytes == 8_000_000)
        # As it was declared, as it comes, and as it is inflated.
        bomb = gzip.compress(large)
        declared = head(mine, "POST", CHAT, len(large))
        chunked = head(mine, "POST", CHAT).replace(
            b"content-length: 0", b"transfer-encoding: chunked"
        )
        inflated = head(mine, "POST", CHAT, len(bomb), "content-encoding: gzip\r\n")
        for sent in (declared, chunked + b"%x\r\n" % len(large) + large, inflated + bomb):
            assert await (await made.connect(sent)).status() == 429
        # Others are not concerned, and neither is what is small enough.
        assert await (await made.post(other, CHAT, large)).status() == 400
        assert await (await made.post(mine, CHAT, b"no")).status() == 400
        half.writer.close()
        await until(lambda: made.proxy.totals.bytes == 0)
        assert await (await made.post(mine, CHAT, large)).status() == 400
        assert made.proxy.totals.refused["bytes"] == 3


async def test_a_body_of_millions_of_tiny_values_is_not_parsed() -> None:
    async with house() as made:
        attempt = made.open()
        tiny = b'{"output":[' + b"1," * 2_500_000 + b"1]}"
        for path in (CHAT, MESSAGES, "tools/wait", "result"):
            assert await (await made.post(attempt, path, tiny)).status() == 413, path
        assert (attempt.output, attempt.flags) == (None, {"result_cut_off"})


async def test_all_attempts_together_are_bounded_and_each_keeps_a_little() -> None:
    async with house(max_request_mb=10) as made:
        greedy = [made.open() for _ in range(8)]
        # Trying again what alone is over the bound would not help.
        assert await (await made.post(greedy[0], CHAT, b"", 10_000_001)).status() == 413
        for one in greedy:
            await made.post(one, CHAT, b"", 10_000_000)
        await until(lambda: made.proxy.totals.bytes == 80_000_000)
        late = made.open()
        assert await (await made.post(late, CHAT, b"", 9_000_000)).status() == 429
        assert await (await made.post(late, CHAT, b" " * 3_000_000)).status() == 400


# Requests


async def test_unknown_keys_have_a_rate_together() -> None:
    async with house(max_requests_per_second=2) as made:
        clients = [await made.connect(head(None, "GET", "v1/models")) for _ in range(60)]
        assert {await client.status() for client in clients} == {404, 429}
        assert await (await made.get(made.open())).status() == 200


async def test_unrecorded_clients_have_no_bounds() -> None:
    async with house(max_connections=2, max_requests_per_second=1) as made:
        sent = head(None, "POST", "v1/completions", 9).replace(
            b"unknown", made.proxy.open_unrecorded().encode()
        )
        held = [await made.connect(sent) for _ in range(20)]
        for client in held:
            client.writer.write(b"x" * 9)
        assert 429 not in {await client.status() for client in held}
