"""Agents reach the hosts that their environment lists through the server, which records it all."""

import asyncio
import base64
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.serving import attempt_spec
from support.waiting import PATIENCE, until

from envserver import ConfigError, OpenAIConfig
from envserver.http.proxy_server import ProxyServer, serve_proxy
from envserver.models.openai import OpenAIEngine
from envserver.proxy import egress
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.egress import Egress, NotTls, server_name
from envserver.proxy.egress_rules import (
    BadHead,
    EgressRefused,
    EgressRules,
    asks_a_proxy,
    is_public,
    read_answer,
    read_request,
)
from envserver.proxy.server import Proxy


class Outside:
    """A host outside: echoes what follows a CONNECT, and answers plain HTTP.

    Args:
        heads: of the HTTP requests that came; bodies: what came after them.
        came: bytes of tunnels.
    """

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.came = 0
        self.port = 0
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nKeep-Alive: 9\r\n\r\nhello"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(1)
        if first and first in b"GP":
            self.heads.append(first + await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.answer)
            writer.write_eof()
            self.bodies.append(await reader.read())
        else:  # TLS
            data = first
            while data:
                self.came += len(data)
                writer.write(data)
                data = await reader.read(1 << 16)
        writer.close()


@dataclass
class House:
    proxy: Proxy
    server: ProxyServer
    outside: Outside
    egress: Any

    def open(self) -> ProxyAttempt:
        return self.proxy.open(attempt_spec())

    async def fetch(self, key: str, url: str, **more: Any) -> httpx.Response:
        proxy = f"http://envserver:{key}@127.0.0.1:{self.server.port}"
        async with httpx.AsyncClient(proxy=proxy, timeout=PATIENCE) as client:
            return await client.request("GET" if "content" not in more else "POST", url, **more)

    async def connect(self, first: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(first)
        return reader, writer

    async def tunnel(
        self, attempt: ProxyAttempt, first: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A tunnel, with `first` sent (default: the beginning of TLS for its host)."""
        reader, writer = await self.connect(connect_head(attempt.key, self.outside.port))
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(first or HELLO)
        return reader, writer


def hello(name: str) -> bytes:
    """The first message of a real TLS client."""
    came, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(came, sent, server_hostname=name).do_handshake()
    return sent.read()


HELLO = hello("API.test")


def credentials(key: str) -> bytes:
    return b"Proxy-Authorization: Basic " + base64.b64encode(b"envserver:" + key.encode())


def connect_head(key: str, port: int, host: str = "api.test") -> bytes:
    return b"CONNECT %b:%d HTTP/1.1\r\n%b\r\n\r\n" % (host.encode(), port, credentials(key))


@asynccontextmanager
async def house(
    *more_hosts: str, max_requests: int = 50, max_bytes: int = 10**7
) -> AsyncIterator[House]:
    outside = Outside()
    listener = await asyncio.start_server(outside.serve, "127.0.0.1", 0)
    outside.port = listener.sockets[0].getsockname()[1]
    rules = EgressRules(
        [f"api.test:{outside.port}", *(f"{host}:{outside.port}" for host in more_hosts)],
        addresses_for_tests={"api.test": "127.0.0.1"},
    )
    egress = Egress(rules, max_requests=max_requests, max_bytes=max_bytes)
    async with OpenAIEngine(OpenAIConfig(base_url="http://127.0.0.1:9/v1")) as engine:
        proxy = Proxy(engine, egress=egress)
        server = await serve_proxy(proxy)
        try:
            yield House(proxy, server, outside, proxy.egress)
        finally:
            await server.close()
            listener.close()


@pytest.fixture
async def made() -> AsyncIterator[House]:
    async with house() as made:
        yield made


@pytest.fixture
def attempt(made: House) -> ProxyAttempt:
    return made.open()


async def test_requests_are_forwarded_and_recorded(made: House, attempt: ProxyAttempt) -> None:
    url = f"http://API.test:{made.outside.port}/v1/things?key=hidden"
    answer = await made.fetch(
        attempt.key, url, headers={"connection": "x-mine", "x-mine": "1"}, content=b"body"
    )
    await until(lambda: not attempt.egress.running and made.outside.bodies)
    assert (answer.status_code, answer.text) == (200, "hello")
    assert answer.headers["connection"] == "close" and "keep-alive" not in answer.headers
    (head,) = made.outside.heads
    assert head.startswith(b"POST /v1/things?key=hidden HTTP/1.1\r\nHost: api.test:")
    assert b"roxy" not in head and b"x-mine" not in head and attempt.key.encode() not in head
    assert made.outside.bodies == [b"body"]
    (request,) = attempt.egress.requests
    assert (request.method, request.host, request.path) == ("POST", "api.test", "/v1/things")
    assert (request.status, request.end) == (200, "")
    assert request.sent_bytes == len(head) + 4
    assert request.received_bytes == len(made.outside.answer)
    assert made.egress.counts == {"ok": 1} and "egress_refused" not in attempt.flags


async def test_tunnels_carry_bytes_both_ways_counted(made: House, attempt: ProxyAttempt) -> None:
    reader, writer = await made.tunnel(attempt)
    data = bytes(300_000)
    writer.write(data)
    writer.write_eof()
    assert await reader.read(-1) == HELLO + data
    data = HELLO + data
    writer.close()
    await until(lambda: not attempt.egress.running)
    # The same socket still serves the model's API, however slowly a request begins.
    reader, writer = await made.connect(b"GE")
    await asyncio.sleep(0)
    writer.write(b"T /r/%b/v1/models HTTP/1.1\r\nHost: x\r\n\r\n" % attempt.key.encode())
    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()
    (request,) = attempt.egress.requests
    assert (request.method, request.path, request.status) == ("CONNECT", "", 0)
    assert request.sent_bytes == request.received_bytes == len(data)
    assert attempt.egress.bytes == made.egress.bytes == 2 * len(data)


async def test_what_is_not_listed_is_refused_typed_and_counted() -> None:
    async with house("localhost", "127.0.0.1") as made:
        attempt = made.open()
        port = made.outside.port
        refused = {
            "host": [f"http://other.test:{port}/", f"http://xapi.test:{port}/"],
            "port": ["http://api.test/"],
            "address": [f"http://localhost:{port}/", f"http://127.0.0.1:{port}/"],
        }
        for urls in refused.values():
            for url in urls:
                answer = await made.fetch(attempt.key, url)
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "egress_refused"
        reader, writer = await made.connect(connect_head(attempt.key, port, "localhost"))
        assert b" 403 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        for key in ("", "wrong"):
            answer = await made.fetch(key, f"http://api.test:{port}/")
            assert answer.status_code == 407
    assert [one.end for one in attempt.egress.requests] == [
        *("host", "host", "port", "address", "address", "address")
    ]
    assert made.egress.counts == {"host": 2, "port": 1, "address": 3}
    assert "egress_refused" in attempt.flags
    assert not made.outside.heads and not made.outside.came


async def test_requests_and_bytes_of_a_rollout_are_bounded() -> None:
    async with house(max_requests=2, max_bytes=100_000) as made:
        attempt = made.open()
        reader, writer = await made.tunnel(attempt)
        writer.write(bytes(90_000))
        got = await reader.read(-1)  # cut off: the echo is over the bound
        assert len(got) < 90_000
        writer.close()
        url = f"http://api.test:{made.outside.port}/"
        answer = await made.fetch(attempt.key, url, content=bytes(90_000))
        assert answer.status_code == 429
        other = made.open()
        answers = [await made.fetch(other.key, url) for _ in range(3)]
        await until(lambda: not attempt.egress.running)
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert attempt.egress.bytes <= 100_000
    assert [one.end for one in attempt.egress.requests] == ["bytes", "bytes"]
    assert [one.end for one in other.egress.requests] == ["", "", "requests"]


async def test_connections_end_with_their_attempt(made: House, attempt: ProxyAttempt) -> None:
    reader, writer = await made.tunnel(attempt)
    assert await reader.readexactly(len(HELLO)) == HELLO
    made.proxy.seal(attempt)
    await made.proxy.settle(attempt)
    assert [(one.end, one.sent_bytes) for one in attempt.egress.requests] == [("cut", len(HELLO))]
    assert await reader.read(-1) == b""
    writer.close()
    answer = await made.fetch(attempt.key, f"http://api.test:{made.outside.port}/")
    assert answer.status_code == 407


async def test_a_sandbox_cannot_connect_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "_MOST_REFUSED_CONNECTIONS", 2)
    async with house(max_requests=1) as made:
        attempt = made.open()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]

        class Box:
            async def lead_out(self, serve: egress.OnConnection) -> asyncio.AbstractServer:
                return await asyncio.start_server(serve, sock=listener)

        server = await made.egress.serve_sandbox(Box(), attempt)
        assert isinstance(server, asyncio.AbstractServer)
        for answer in (b" 400 ", b" 400 ", b" 400 ", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"?\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert answer in await reader.read(-1)
            writer.close()
        assert not server.is_serving() and "over_bound" in attempt.flags
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize(
    "first", [hello("other.test"), b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\0\x05hello"]
)
async def test_a_tunnel_begins_with_tls(made: House, attempt: ProxyAttempt, first: bytes) -> None:
    reader, writer = await made.tunnel(attempt, first)
    assert await reader.read(-1) == b""
    writer.close()
    await until(lambda: not attempt.egress.running)
    assert [(one.end, one.sent_bytes) for one in attempt.egress.requests] == [("name", 0)]
    assert not made.outside.came


@settings(max_examples=examples(200))
@given(st.data())
def test_a_client_hello_is_read_in_pieces_or_refused(data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(HELLO)))
    assert server_name(HELLO[:cut]) == ("api.test" if cut == len(HELLO) else None)
    assert server_name(HELLO + data.draw(st.binary(max_size=4))) == "api.test"
    at = data.draw(st.integers(0, len(HELLO) - 1))
    with contextlib.suppress(NotTls):
        server_name(HELLO[:at] + data.draw(st.binary(max_size=4)) + HELLO[at + 1 :])
    # One in tiny records would be read again for each byte that comes, on the server's event loop.
    tiny = b"".join(b"\x16\x03\x01\0\x01" + HELLO[at : at + 1] for at in range(5, 20))
    with pytest.raises(NotTls):
        server_name(tiny)


async def test_nothing_is_smuggled_behind_a_request(made: House, attempt: ProxyAttempt) -> None:
    where = b"http://api.test:%d/" % made.outside.port
    key = credentials(attempt.key)
    second = b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n"
    reader, writer = await made.connect(
        b"GET %b HTTP/1.1\r\n%b\r\nHost: other.test\r\n\r\n%b" % (where, key, second)
    )
    assert b" 200 " in await reader.read(-1)
    writer.close()
    for framing in (b"Transfer-Encoding: chunked", b"Content-Length: 1\r\nContent-Length: 2"):
        reader, writer = await made.connect(
            b"POST %b HTTP/1.1\r\n%b\r\n%b\r\n\r\n" % (where, key, framing)
        )
        assert b" 400 " in await reader.read(-1)
        writer.close()
    length = b"Content-Length: %d\r\nConnection: content-length" % len(second)
    reader, writer = await made.connect(
        b"POST %b HTTP/1.1\r\n%b\r\n%b\r\n\r\n%b" % (where, key, length, second)
    )
    assert b" 200 " in await reader.read(-1)
    writer.close()
    await until(lambda: not attempt.egress.running and len(made.outside.bodies) == 2)
    head, of_body = made.outside.heads
    assert b"other.test" not in head and made.outside.bodies == [b"", second]
    assert b"Content-Length: %d\r\n" % len(second) in of_body  # else the body is a request


PRIVATE = (
    "127.0.0.1 127.8.8.8 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 "
    "192.0.2.1 224.0.0.1 255.255.255.255 ::1 :: fe80::1 fe80::1%eth0 fd00::1 ff02::1 "
    "::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1::1 2001::1 localhost fec0::1"
)


def test_only_public_addresses_are_public() -> None:
    for address in ("", *PRIVATE.split()):
        assert not is_public(address), address
    for address in ("1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1"):
        assert is_public(address), address


def test_the_list_of_hosts() -> None:
    rules = EgressRules(["api.example.com", "*.example.org", "b.example:8443"])
    for host, port in (("api.example.com", 80), ("a.b.example.org", 443), ("b.example", 8443)):
        rules.check(host, port)
    for host, port, end in (
        ("example.com", 443, "host"),
        ("example.org", 443, "host"),
        ("api.example.com.evil.net", 443, "host"),
        ("api.example.com", 22, "port"),
        ("b.example", 443, "port"),
    ):
        with pytest.raises(EgressRefused) as caught:
            rules.check(host, port)
        assert caught.value.end == end
    for wrong in ("http://a.com", "a.com/x", "*", "*.*.com", "a b", "", "a.com:0", "[::1]", "a@b"):
        with pytest.raises(ConfigError):
            EgressRules([wrong])
    with pytest.raises(ConfigError):
        EgressRules("api.example.com")


_HEADS = st.sampled_from(
    [
        b"GET http://api.test/x HTTP/1.1",
        b"CONNECT api.test:443 HTTP/1.1",
        b"POST http://api.test:81/?q HTTP/1.0",
        b"HTTP/1.1 200 OK",
    ]
)
_FIELDS = st.sampled_from(
    [b"Host: a", b"Connection: x", b"X: y", b"Content-Length: 3", b" folded", b"Bad", b"Proxy-X: 1"]
)


@settings(max_examples=examples(200))
@given(st.binary(max_size=40) | _HEADS, st.lists(st.binary(max_size=20) | _FIELDS, max_size=4))
def test_any_head_is_read_or_refused(first: bytes, fields: list[bytes]) -> None:
    head = b"\r\n".join([first, *fields, b"", b""])
    assert asks_a_proxy(head) in (True, False, None)
    for read in (read_request, read_answer):
        try:
            found = read(head)
        except BadHead:
            continue
        outgoing = found[1] if isinstance(found, tuple) else found.outgoing
        assert outgoing.count(b"\r\n\r\n") <= 1 and b"\n" not in outgoing.replace(b"\r\n", b"")
