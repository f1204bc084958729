"""The recording proxy through which agents reach the hosts that their environment lists.

    GET http://api.example.com/v1 HTTP/1.1      CONNECT api.example.com:443 HTTP/1.1
    Proxy-Authorization: Basic ...              Proxy-Authorization: Basic ...

The key of a running attempt is needed, except on the socket of its own sandbox; every request is
recorded with its bytes, refused ones too; no attempt exceeds its requests and bytes; all
connections of an attempt end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Protocol

import orjson
import structlog
from envserver_records.timings import EgressEnd, EgressRequest
from envserver_records.waiting import cancel_and_wait

from .attempts import ProxyAttempt
from .bounds import OverBound
from .egress_rules import (
    MOST_HEAD_BYTES,
    BadHead,
    EgressRefused,
    EgressRules,
    EgressUse,
    RequestHead,
    read_answer,
    read_request,
)

# A tunnel to a listed host must not lead to another name at the same address: so its first message
# is a ClientHello that names this host (RFC 8446, section 4.1.2; RFC 6066, section 3).

MOST_HELLO_BYTES = 1 << 16
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_MOST_RECORDS = 8
"""A message in tiny records would be read again and again, for each of their bytes."""
_BEFORE_SESSION = 2 + 32


class NotTls(Exception):
    """The bytes are no ClientHello with a name."""


class _Cursor:
    """Reads numbers and vectors; raises NotTls at the end of the bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise NotTls("A ClientHello is malformed.")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> _Cursor:
        """Returns the bytes after their length, which takes `size` bytes."""
        return _Cursor(self.take(self.number(size)))


def server_name(first: bytes) -> str | None:
    """Returns the name in the ClientHello that `first` begins with; None: more bytes are needed."""
    hello = _hello(first)
    if hello is None:
        return None
    cursor = _Cursor(hello)
    cursor.take(_BEFORE_SESSION)
    cursor.vector(1)  # session
    cursor.vector(2)  # cipher suites
    cursor.vector(1)  # compression
    extensions = cursor.vector(2)
    while extensions.left:
        kind, extension = extensions.number(2), extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        names = extension.vector(2)
        while names.left:
            is_host, name = names.number(1) == _HOST_NAME, names.vector(2)
            if is_host:
                return name.take(name.left).decode("ascii", "replace").lower()
    raise NotTls("A ClientHello names no host.")


def _hello(first: bytes) -> bytes | None:
    """Returns the body of the ClientHello, which may come in several records."""
    message = b""
    at = 0
    for _ in range(_MOST_RECORDS + 1):
        if message[:1] not in (b"", bytes([_CLIENT_HELLO])):
            raise NotTls("The data is not a ClientHello.")
        if len(message) >= 4 and len(message) >= (end := 4 + int.from_bytes(message[1:4])):
            return message[4:end]
        if len(first) > MOST_HELLO_BYTES:
            raise NotTls("A ClientHello is too long.")
        if first[at : at + 1] not in (b"", bytes([_HANDSHAKE])):
            raise NotTls("The data is not TLS.")
        head, size = first[at : at + 5], int.from_bytes(first[at + 3 : at + 5])
        if len(head) < 5 or len(first) < at + 5 + size:
            return None
        if not size:
            raise NotTls("A record is empty.")
        message += first[at + 5 : at + 5 + size]
        at += 5 + size
    raise NotTls("A ClientHello is in too many records.")


_HEAD_SECONDS = 20.0
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 60.0
"""Seconds without a byte after which a side has broken off."""
_PIECE_BYTES = 1 << 16
_MOST_ADDRESSES = 3
"""Addresses of one host that are tried."""
_MOST_REFUSED = 100
"""Refused requests of one attempt that are recorded; all are counted."""
_MOST_REFUSED_CONNECTIONS = 1000
"""Connections of one sandbox beyond its requests: then its programs cannot connect any more."""
_MOST_PATH = 500
_MOST_METHOD = 20
_SETTLE_SECONDS = 5.0
_REFUSALS: frozenset[EgressEnd] = frozenset(
    {"host", "port", "address", "name", "requests", "bytes"}
)
EGRESS_REFUSED = "egress_refused"
"""Flag of a rollout that asked for what it may not reach."""
_STATUS: dict[EgressEnd, HTTPStatus] = {
    "unknown_host": HTTPStatus.BAD_GATEWAY,
    "unreachable": HTTPStatus.BAD_GATEWAY,
    "cut": HTTPStatus.BAD_GATEWAY,
    "time": HTTPStatus.GATEWAY_TIMEOUT,
    "requests": HTTPStatus.TOO_MANY_REQUESTS,
    "bytes": HTTPStatus.TOO_MANY_REQUESTS,
}
_CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"

_log = structlog.get_logger("envserver.egress")


OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Closable(Protocol):
    def close(self) -> None: ...


class LeadsOut(Protocol):
    async def lead_out(self, serve: OnConnection) -> Closable | None: ...


class Egress:
    def __init__(self, rules: EgressRules, *, max_requests: int, max_bytes: int) -> None:
        self._rules = rules
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.counts: Counter[str] = Counter()
        """Requests since the start by how they ended ("ok", or an EgressEnd)."""
        self.bytes = 0

    async def serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        find: Callable[[str], Awaitable[ProxyAttempt | None]],
        own: Callable[[ProxyAttempt], None],
    ) -> None:
        """Answers one connection, and closes it; `own` is called with the attempt that it is of."""
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = read_request(await reader.readuntil(b"\r\n\r\n"))
            attempt = await find(head.key)
            if attempt is None or attempt.sealed:
                await _tell(writer, 407, "This proxy needs the key of a running attempt.")
                return
            own(attempt)
            task = asyncio.current_task()
            assert task is not None
            attempt.hold(task)
            attempt.egress.running.add(task)
            task.add_done_callback(attempt.egress.running.discard)
            await attempt.in_flight.admit()
            await self._record(attempt, head, reader, writer)
        except (BadHead, asyncio.LimitOverrunError) as error:
            what = str(error) or f"A header has at most {MOST_HEAD_BYTES} bytes."
            await _tell(writer, HTTPStatus.BAD_REQUEST, what)
        except OverBound as error:
            await _tell(writer, HTTPStatus.TOO_MANY_REQUESTS, str(error))
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            pass  # the agent is gone, or never finished its request
        finally:
            writer.close()

    async def serve_sandbox(self, sandbox: LeadsOut, attempt: ProxyAttempt) -> Closable | None:
        """Serves the programs of a sandbox until the result is closed; None: it has no network.

        They need no key, and must not have it: with it they could call the model. After many
        connections without a request, it ends early: a program could connect without end.
        """
        left = self._max_requests + _MOST_REFUSED_CONNECTIONS
        server: Closable | None = None

        async def find(key: str) -> ProxyAttempt:
            return attempt

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                if server is not None:
                    server.close()
                writer.close()
                attempt.in_flight.refused("connections")
                return
            connection = _OfSandbox(writer)
            attempt.in_flight.claim(connection, is_short=False)
            try:
                await self.serve(reader, writer, find, lambda attempt: None)
            finally:
                attempt.in_flight.connections.discard(connection)

        server = await sandbox.lead_out(serve)
        return server

    async def settle(self, attempt: ProxyAttempt) -> None:
        """Waits, for a bounded time, until the connections of a sealed attempt have ended."""
        if running := attempt.egress.running:
            await asyncio.wait(running, timeout=_SETTLE_SECONDS)

    async def _record(
        self,
        attempt: ProxyAttempt,
        head: RequestHead,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        request = EgressRequest(
            method=head.method[:_MOST_METHOD],
            host=head.host,
            port=head.port,
            path=head.path[:_MOST_PATH],
        )
        exchange = _Exchange(self, attempt.egress, head, request, reader, writer)
        try:
            self._admit(attempt.egress, request)
            await exchange.run(self._rules)
        except EgressRefused as refused:
            request.end = refused.end
            if not exchange.begun:
                await _tell(writer, _STATUS.get(refused.end, HTTPStatus.FORBIDDEN), str(refused))
        except TimeoutError:
            request.end = "time"
        except (OSError, BadHead, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            request.end = "cut"
        except asyncio.CancelledError:
            request.end = "cut"
            raise
        finally:
            self._count(attempt, request)
        if request.end in ("time", "cut") and not exchange.begun:
            await _tell(writer, _STATUS[request.end], "The host did not answer.")

    def _admit(self, use: EgressUse, request: EgressRequest) -> None:
        try:
            self._rules.check(request.host, request.port)
            if use.made >= self._max_requests:
                most = self._max_requests
                raise EgressRefused(
                    f"All {most} requests to hosts outside are used up.", "requests"
                )
            self.take(use, 0)
        except EgressRefused:
            use.refused += 1
            if use.refused <= _MOST_REFUSED:
                use.requests.append(request)
            raise
        use.made += 1
        use.requests.append(request)

    def take(self, use: EgressUse, size: int) -> None:
        """Counts bytes before they are passed on."""
        if use.bytes + size > self._max_bytes or use.bytes >= self._max_bytes:
            most = self._max_bytes / 1e6
            raise EgressRefused(f"All {most:g} MB to and from hosts outside are used up.", "bytes")
        use.bytes += size
        self.bytes += size

    def _count(self, attempt: ProxyAttempt, request: EgressRequest) -> None:
        self.counts[request.end or "ok"] += 1
        if request.end in _REFUSALS and EGRESS_REFUSED not in attempt.flags:
            attempt.flags.add(EGRESS_REFUSED)
            _log.warning(
                "egress_refused",
                rollout_id=attempt.spec.rollout_id,
                host=request.host,
                port=request.port,
                end=request.end,
            )


class _OfSandbox:
    """A connection of a program in a sandbox; see `bounds.Connection`."""

    is_answered = False

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def drop(self, error: OverBound) -> None:
        self._writer.close()


class _Exchange:
    """One request that is carried out. `begun`: the agent has got a part of the answer."""

    def __init__(
        self,
        egress: Egress,
        use: EgressUse,
        head: RequestHead,
        request: EgressRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.begun = False
        self._egress = egress
        self._use = use
        self._head = head
        self._request = request
        self._reader = reader
        self._writer = writer
        self._idle = asyncio.timeout(_IDLE_SECONDS)

    async def run(self, rules: EgressRules) -> None:
        async with asyncio.timeout(_CONNECT_SECONDS):
            addresses = await rules.addresses(self._head.host, self._head.port)
        host_reader, host_writer = await _connected(addresses, self._head.port)
        try:
            async with self._idle:
                if self._head.is_tunnel:
                    await self._tunnel(host_reader, host_writer)
                else:
                    await self._forward(host_reader, host_writer)
        finally:
            host_writer.close()

    async def _tunnel(
        self, host_reader: asyncio.StreamReader, host_writer: asyncio.StreamWriter
    ) -> None:
        self.begun = True
        self._writer.write(_CONNECTED)
        await self._writer.drain()
        await self._greet(host_writer)
        sending = asyncio.create_task(self._to_host(host_writer, None))
        receiving = asyncio.create_task(self._to_agent(host_reader))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                await receiving  # the agent has sent all; the host may still answer
            receiving.result()
        finally:
            await cancel_and_wait(sending, receiving)

    async def _greet(self, host_writer: asyncio.StreamWriter) -> None:
        """Passes on the first message of a tunnel, once it is known to ask for this very host."""
        first = b""
        name = None
        try:
            while name is None:
                data = await self._reader.read(_PIECE_BYTES)
                if not data:
                    return  # the agent changed its mind
                first += data
                name = server_name(first)
        except NotTls as error:
            raise EgressRefused(str(error), "name") from None
        if name != self._head.host:
            raise EgressRefused(f"The tunnel asks for {name[:100]!r}.", "name")
        self._sent(len(first))
        host_writer.write(first)

    async def _forward(
        self, host_reader: asyncio.StreamReader, host_writer: asyncio.StreamWriter
    ) -> None:
        self._sent(len(self._head.outgoing))
        host_writer.write(self._head.outgoing)
        await self._to_host(host_writer, self._head.body_bytes)
        status = 100
        while status < 200:  # interim answers are for the connection
            came = await host_reader.readuntil(b"\r\n\r\n")
            status, outgoing = read_answer(came)
            self._received(len(came))
            if status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise BadHead("The host changes the protocol.")
        self._request.status = status
        self.begun = True
        self._writer.write(outgoing)
        await self._to_agent(host_reader)

    async def _to_host(self, host_writer: asyncio.StreamWriter, size: int | None) -> None:
        """Passes on what the agent sends: `size` bytes, or all of it."""
        left = size
        while left is None or left > 0:
            data = await self._reader.read(min(_PIECE_BYTES, left or _PIECE_BYTES))
            if not data:
                break
            self._sent(len(data))
            left = None if left is None else left - len(data)
            host_writer.write(data)
            await host_writer.drain()
        if size is None and host_writer.can_write_eof():
            host_writer.write_eof()

    async def _to_agent(self, host_reader: asyncio.StreamReader) -> None:
        while data := await host_reader.read(_PIECE_BYTES):
            self._received(len(data))
            self._writer.write(data)
            await self._writer.drain()

    def _sent(self, size: int) -> None:
        self._passing(size)
        self._request.sent_bytes += size

    def _received(self, size: int) -> None:
        self._passing(size)
        self._request.received_bytes += size

    def _passing(self, size: int) -> None:
        self._egress.take(self._use, size)
        self._idle.reschedule(asyncio.get_running_loop().time() + _IDLE_SECONDS)


async def _connected(
    addresses: list[str], port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to the first address that answers: to the address itself, never to a name."""
    for address in addresses[:_MOST_ADDRESSES]:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await asyncio.open_connection(address, port, limit=MOST_HEAD_BYTES)
    raise EgressRefused("The host cannot be reached.", "unreachable")


async def _tell(writer: asyncio.StreamWriter, status: int, message: str) -> None:
    body = orjson.dumps({"error": {"message": message, "code": EGRESS_REFUSED}})
    phrase = HTTPStatus(status).phrase.encode()
    lines = [b"HTTP/1.1 %d %b" % (status, phrase), b"Content-Type: application/json"]
    if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        lines.append(b'Proxy-Authenticate: Basic realm="envserver"')
    lines += [b"Content-Length: %d" % len(body), b"Connection: close", b"", body]
    writer.write(b"\r\n".join(lines))
    with contextlib.suppress(OSError):
        await writer.drain()
