"""HTTP connections with limits, so that slow or greedy clients cannot block the server.

Extends uvicorn's protocol. What holds: the number of connections is limited; the request line and
headers are limited in size, number and time; a body that stalls or arrives too slowly is aborted;
an unread body is drained only if little of it is left. A client that exceeds a limit gets an
error (431, 414, 408, 429 or 503, as problem details) and is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from envserver_records.errors import UsageError
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ...settings.server import ServerConfig
from ..bodies import ABORT
from ..problems import error_answer

_MOST_BYTES: Final = 64 * 1024


class JoinedWrites:
    """A transport that joins writes; everything else is done by the transport that it is given.

    What is written in one turn of the event loop goes out at its end, or as soon as it is 64 KB.
    The order of writes, and of closing, stays.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Writes `data` at the end of this turn of the loop."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > _MOST_BYTES:
            self._flush()

    def writelines(self, parts: list[bytes]) -> None:
        """See `write`."""
        self.write(b"".join(parts))

    def write_eof(self) -> None:
        """Ends what is written."""
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Closes the connection once all is written."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))


class JoinedHttp(HttpToolsProtocol):
    """uvicorn's protocol with joined writes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        joined = JoinedWrites(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, joined))


_MOST_PIPELINED: Final = 16
"""Requests that were sent before the one in front of them was answered; hardly any client does."""


@dataclass(frozen=True)
class HttpBounds:
    """Connection limits; see the settings of the same names (`ServerConfig`)."""

    max_connections: int
    max_header_bytes: int
    max_headers: int
    max_url_bytes: int
    header_seconds: float
    body_idle_seconds: float
    body_seconds: float

    @classmethod
    def of(cls, settings: ServerConfig) -> HttpBounds:
        return cls(**{name: getattr(settings, name) for name in cls.__dataclass_fields__})


class TooSlow(UsageError):
    kind, status = "too_slow", 408


class HeadersTooLarge(UsageError):
    kind, status = "headers_too_large", 431


class UrlTooLong(UsageError):
    kind, status = "url_too_long", 414


class TooManyConnections(UsageError):
    kind, status = "too_many_connections", 503


class TooManyPipelined(UsageError):
    kind, status = "too_many_pipelined", 429


class BoundedHttp(JoinedHttp):
    """One connection. Its phase is idle, reading headers, or reading a body.

    Subclasses may override `head_came` and `answer_to`.
    """

    most_discarded = 1 << 20
    """Bytes of a body that are still read after its answer; then the connection is closed."""

    def __init__(self, *args: Any, bounds: HttpBounds, **more: Any) -> None:
        super().__init__(*args, **more)
        self._bounds = bounds
        self._phase: Literal["idle", "head", "body"] = "idle"
        self._head_bytes = 0
        self._refused = False
        self._discarded = 0
        self._timer: asyncio.TimerHandle | None = None
        self._body_began = self._body_came = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            self._refuse(TooManyConnections("The server has as many connections as it may."))
        else:
            self._timer = self.loop.call_later(self._bounds.header_seconds, self._head_too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._phase != "body":
            self._head_bytes += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._phase != "body" and self._head_bytes > self._bounds.max_header_bytes:
            self._refuse(self._headers_too_large())
        elif self._timer is None:
            # Requests that arrive whole, as most do, need no timer.
            if self._phase == "head":
                self._timer = self.loop.call_later(self._bounds.header_seconds, self._head_too_slow)
            elif self._phase == "body":
                self._watch_body()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}
        self._phase = "head"
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._bounds.max_url_bytes:
            self._refuse(UrlTooLong(f"The URL has more than {self._bounds.max_url_bytes} bytes."))

    def on_headers_complete(self) -> None:
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > self._bounds.max_headers or size > self._bounds.max_header_bytes:
            self._refuse(self._headers_too_large())
        elif len(self.pipeline) >= _MOST_PIPELINED:
            self._refuse(TooManyPipelined(f"More than {_MOST_PIPELINED} requests wait."))
        else:
            self.head_came()
        if self._refused:
            return
        super().on_headers_complete()
        self._phase = "body"
        self._discarded = 0
        self._body_began = self._body_came = self.loop.time()

    def head_came(self) -> None:
        """Called when the head of a request is complete and within its limits; may `_refuse` it."""

    def answer_to(self, error: UsageError) -> bytes:
        """Returns the whole answer to a request that exceeds a limit."""
        answer = error_answer("/v1", error.status, error.message, kind=error.kind)
        return last_answer(error.status, answer.raw_headers, bytes(answer.body))

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body_came = self.loop.time()
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > self.most_discarded:
                self._refused = True
                self.transport.close()
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused:
            return
        self._stop_timer()
        self._phase = "idle"
        self._head_bytes = 0
        super().on_message_complete()

    def _head_too_slow(self) -> None:
        self._timer = None
        if self._phase == "idle":
            # Idle, or an earlier request is still being handled.
            if self.cycle is None:
                self.transport.close()
            return
        seconds = self._bounds.header_seconds
        self._refuse(TooSlow(f"The headers took more than {seconds:g} seconds."))

    def _watch_body(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:
            self._body_came = now  # the server paused reading, not the client
        idle = now - self._body_came
        left = min(
            self._bounds.body_idle_seconds - idle,
            self._body_began + self._bounds.body_seconds - now,
        )
        if left > 0:
            self._timer = self.loop.call_later(left, self._watch_body)
        else:
            self._timer = None
            self._refuse(TooSlow(f"The body took too long; nothing came for {idle:.0f} seconds."))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _headers_too_large(self) -> HeadersTooLarge:
        most = self._bounds
        return HeadersTooLarge(
            f"More than {most.max_headers} headers, or {most.max_header_bytes} bytes of them."
        )

    def _refuse(self, error: UsageError) -> None:
        """Sends the error, unless a response has already begun, and closes the connection."""
        if self._refused:
            return
        self._refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        answering = self.cycle is not None and not self.cycle.response_complete
        if not (answering and (self.cycle.response_started or self.cycle.scope is not self.scope)):
            self.transport.write(self.answer_to(error))
        self.transport.close()


def last_answer(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Returns the bytes of an answer after which the connection is closed."""
    lines = b"".join(b"%b: %b\r\n" % header for header in (*headers, (b"connection", b"close")))
    return STATUS_LINE[status] + lines + b"\r\n" + body
