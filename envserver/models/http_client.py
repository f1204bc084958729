"""An HTTP/1.1 client for engines, with connections that are kept between requests.

llhttp (by httptools) reads the answers, for a third of aiohttp's CPU. Invariants: an answer that
ended normally was complete; a connection whose answer was not read to its end is closed; only
`HttpError` and its kinds are raised for what a peer does.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import aiohappyeyeballs
import httptools

SocketFactory = Callable[[tuple[Any, ...]], Any]
Resolve = Callable[[str, int], Awaitable[list[Any]]]

_CONNECT_SECONDS = 10.0
_IDLE_CONNECTION_SECONDS = 4.0
"""Below the five seconds after which uvicorn, and so vLLM, closes an idle connection: otherwise a
request would sometimes use a connection that is just being closed."""
_NEXT_ADDRESS_SECONDS = 0.25
"""Time for one address of a name before the next one is tried beside it."""
_MAX_HEAD_BYTES = 64 * 1024
_BUFFER_BYTES = 256 * 1024
"""Bytes that wait for their reader before the peer has to wait; and most that is inflated at
once."""
_ZIPPED = ("gzip", "x-gzip", "deflate")
_GZIP_OR_ZLIB = 47
"""For zlib: the data says which of both it is."""


class HttpError(Exception):
    """The text is a short reason."""


class NoConnection(HttpError): ...


class NotTrusted(NoConnection): ...


class BrokenOff(HttpError): ...


class NotHttp(HttpError): ...


class Origin(NamedTuple):
    """Where requests go. `prefix`: what their paths begin with; `head`: their first headers."""

    host: str
    port: int
    is_tls: bool
    prefix: bytes
    head: bytes


@lru_cache(maxsize=1024)
def origin_of(url: str) -> Origin:
    """`url` has neither credentials nor a query."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    head = b" HTTP/1.1\r\nhost: %b\r\nuser-agent: envserver\r\naccept: */*\r\n"
    head += b"accept-encoding: identity\r\n"
    return Origin(
        parts.hostname or "",
        parts.port or (443 if is_tls else 80),
        is_tls,
        parts.path.encode(),
        head % parts.netloc.encode(),
    )


def header(name: str, value: str) -> bytes:
    """Raises ValueError if it would be several lines."""
    if "\r" in value or "\n" in value:
        raise ValueError(f"The header {name} must be of one line.")
    return f"{name}: {value}\r\n".encode()


class Response:
    """The answer to one request, read with `read` while it arrives.

    Args:
        headers: names in lower case; of equal names the first.
        complete: all of it has arrived.
        is_reusable: the connection may have another request.
    """

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.has_bytes = False
        self.is_reusable = False
        self.connection = connection
        self._parser: Any = httptools.HttpResponseParser(self)
        self._has_head = self._is_interim = False
        self._bytes_without_body = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._inflater: Any = None

    async def begun(self) -> Response:
        while not self._has_head:
            if self._error is not None:
                raise self._error
            await self._news()
        return self

    async def read(self) -> bytes:
        """The bytes that have arrived since the last time; b"" at the end of the body."""
        while True:
            tail = b"" if self._inflater is None else self._inflater.unconsumed_tail
            if data := tail or self._taken():
                plain = data if self._inflater is None else await self._inflated(data)
                if plain:
                    return plain
            elif self._error is not None:
                raise self._error
            elif self.complete:
                if self._inflater is not None and not self._inflater.eof:
                    raise BrokenOff("its compressed body is cut off")
                return b""
            else:
                await self._news()

    def fail(self, error: Exception) -> None:
        self._parts.clear()
        self._inflater = None
        self._error = self._error or error
        self.wake()

    def release(self) -> None:
        """Gives the connection to the next request, or closes it if the answer is incomplete."""
        self._parser = None  # it refers to this answer
        self.connection.release(self)

    # From the connection

    def feed(self, data: bytes) -> None:
        self.has_bytes = True
        self._bytes_without_body += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.is_reusable = False
            self.ended(None)
        except httptools.HttpParserError as error:
            self.is_reusable = False
            kind = BrokenOff if self._has_head else NotHttp
            self.ended(kind(type(error).__name__))
        if self._bytes_without_body > _MAX_HEAD_BYTES:
            self.ended(NotHttp(f"a head or trailer of over {_MAX_HEAD_BYTES} bytes"))
        self.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._parser = None
        has_length = "content-length" in self.headers or "transfer-encoding" in self.headers
        whole = error is None and self._has_head and not has_length
        self.ended(None if whole else BrokenOff("the connection was closed"))

    def ended(self, error: Exception | None) -> None:
        """Ends it; None: it is complete, and nothing later can change that."""
        if self.complete:
            return
        if error is None:
            self.complete = True
        else:
            self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # httptools

    def on_message_begin(self) -> None:
        if self.complete:  # more than was asked for
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else it is a trailer
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        if self._has_head:
            return
        status = self._parser.get_status_code()
        self._is_interim = 100 <= status < 200 and status != 101
        if self._is_interim:
            self.headers.clear()
            return
        self.status, self._has_head = status, True
        encoding = self.headers.get("content-encoding", "").strip().lower()
        if encoding in _ZIPPED:
            self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
        elif encoding not in ("", "identity"):
            self.ended(NotHttp(f"content-encoding {encoding[:40]!r}"))

    def on_body(self, data: bytes) -> None:
        self._bytes_without_body = 0
        if self.complete or self._error is not None:
            return
        self._parts.append(data)
        self._size += len(data)
        if self._size > _BUFFER_BYTES:
            self.connection.pause()

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
        elif not self.complete:
            # After a 101 comes no HTTP, or an answer that is still to come.
            self.is_reusable = self._parser.should_keep_alive() and self.status != 101
            self.ended(None)

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _taken(self) -> bytes:
        if not self._parts:
            return b""
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._size > _BUFFER_BYTES:
            self.connection.resume()
        self._size = 0
        return data

    async def _inflated(self, data: bytes) -> bytes:
        try:
            plain: bytes = self._inflater.decompress(data, _BUFFER_BYTES)
        except zlib.error:
            raise BrokenOff("its compressed body is damaged") from None
        if self._inflater.eof and (rest := self._inflater.unused_data):  # zipped in several parts
            self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
            self._parts.insert(0, rest)
        await asyncio.sleep(0)  # few bytes may hold seconds of work: others take turns
        return plain


class _Connection(asyncio.Protocol):
    """One connection of a pool; one request at a time."""

    def __init__(self, pool: HttpPool, origin: Origin) -> None:
        self.origin = origin
        self.generation = 0
        """Number of the uninterrupted series of connections to `origin` that it belongs to: after a
        gap another process may answer."""
        self.idle_since = 0.0
        self._pool = pool
        self._transport: asyncio.Transport
        self._response: Response | None = None

    def send(self, request: list[bytes]) -> Response:
        self._response = response = Response(self)
        if self._transport.is_closing():
            response.ended(BrokenOff("the connection was closed"))
        else:
            self._transport.writelines(request)
        return response

    def release(self, response: Response) -> None:
        if self._response is not response:
            return
        self._response = None
        # After an answer that came early, the rest of its request would be taken for the next one.
        is_sent = self._transport.get_write_buffer_size() == 0
        is_usable = response.is_reusable and is_sent and not self._transport.is_closing()
        if response.complete and is_usable:
            self.resume()
            self._pool.keep(self)
        else:
            if response.complete and not response.is_reusable:
                self._pool.unkept.add(self.origin)
            self.close()

    @property
    def is_silent(self) -> bool:
        """Whether it is open and nothing unread has come.

        Bytes after an answer would be taken for the answer to the next request.
        """
        if self._transport.is_closing():
            return False
        arrived = select.poll()
        arrived.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not arrived.poll(0)

    def close(self) -> None:
        """Closes it now and drops unsent bytes."""
        if self._response is not None:
            self._response.is_reusable = False
        self._transport.abort()

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None or response.complete:  # nothing was asked
            self.close()
            return
        response.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.closed(self)
        response, self._response = self._response, None
        if response is not None:
            response.connection_lost(error)


@contextmanager
def _closed_on_failure(connected: socket.socket) -> Iterator[None]:
    """Closes the socket if the loop fails to make a connection of it, and never twice.

    uvloop may close the number and leave the socket open, which would later close whatever has got
    the number then.
    """
    number = connected.fileno()
    inode = os.fstat(number).st_ino
    try:
        yield
    except BaseException:
        try:
            is_open = os.fstat(number).st_ino == inode
        except OSError:
            is_open = False
        if is_open:
            connected.close()
        else:
            connected.detach()
        raise


class HttpPool:
    """The connections to some origins, each kept for a few seconds after its last request.

    `resolve` returns the entries of getaddrinfo; `socket_factory` makes a socket for one of them.
    """

    def __init__(self, resolve: Resolve, socket_factory: SocketFactory) -> None:
        self._resolve = resolve
        self._socket_factory = socket_factory
        self._idle: dict[Origin, deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._generations: Counter[Origin] = Counter()
        self.unkept: set[Origin] = set()
        """Origins that ended their last connection as announced, behind an answer."""
        self._tls: ssl.SSLContext | None = None
        self._cleaning: asyncio.TimerHandle | None = None
        self._is_closed = False

    def close(self) -> None:
        """Closes all connections, also those that are still being made."""
        self._is_closed = True
        for connection in [*self._open]:
            connection.close()
        if self._cleaning is not None:
            self._cleaning.cancel()

    async def send(
        self, origin: Origin, method: str, path: str, headers: bytes, payload: bytes | None
    ) -> Response:
        """Sends a request and returns its answer when the head has come; `release` it.

        A GET is sent again if a kept connection proves to be closed. `headers` are whole lines.
        """
        first = b"%b %b%b" % (method.encode(), origin.prefix, path.encode())
        length = b"\r\n" if payload is None else b"content-length: %d\r\n\r\n" % len(payload)
        request = [first + origin.head + headers + length, *([payload] if payload else [])]
        while True:
            kept = self._kept(origin)
            connection = kept or await self._connect(origin)
            response = connection.send(request)
            try:
                return await response.begun()
            except BrokenOff:
                connection.close()
                if kept is None or method != "GET" or response.has_bytes:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connect(self, origin: Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        goes_on = origin in self.unkept
        self.unkept.discard(origin)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                tls = self._tls
                if origin.is_tls and tls is None:
                    tls = await asyncio.to_thread(ssl.create_default_context)
                connected = await aiohappyeyeballs.start_connection(
                    await self._resolve(origin.host, origin.port),
                    happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS,
                    interleave=1,
                    socket_factory=self._socket_factory,
                )
                with _closed_on_failure(connected):
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self, origin),
                        sock=connected,
                        ssl=tls if origin.is_tls else None,
                        server_hostname=origin.host.rstrip(".") if origin.is_tls else None,
                    )
        except TimeoutError:
            raise NoConnection("connecting took too long") from None
        except ssl.SSLCertVerificationError as error:
            raise NotTrusted(f"its certificate is not trusted ({error.verify_message})") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NoConnection(reason) from error
        # Only now, since without free descriptors it is made without any certificate.
        self._tls = tls or self._tls
        if self._is_closed:
            connection.close()
            raise NoConnection("the connections are closed")
        if not goes_on and all(each.origin != origin for each in self._open):
            self._generations[origin] += 1
        connection.generation = self._generations[origin]
        self._open.add(connection)
        return connection

    # Connections that are kept

    def closed(self, connection: _Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def keep(self, connection: _Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._cleaning is None:
            self._clean()

    def _kept(self, origin: Origin) -> _Connection | None:
        """The most recently used connection that is usable."""
        before = asyncio.get_running_loop().time() - _IDLE_CONNECTION_SECONDS
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.idle_since > before and connection.is_silent:
                return connection
            connection.close()
        return None

    def _clean(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time() - _IDLE_CONNECTION_SECONDS
        for origin, idle in [*self._idle.items()]:
            while idle and idle[0].idle_since <= before:
                idle.popleft().close()
            if not idle:
                del self._idle[origin]
        again = bool(self._idle)
        self._cleaning = loop.call_later(_IDLE_CONNECTION_SECONDS, self._clean) if again else None
