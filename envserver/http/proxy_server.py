"""Serves the proxy to agents, with bounds for each attempt's connections.

A connection belongs to an attempt once the head of its first request has come, with the attempt's
key in its path. Connections that have sent no key yet are bounded for each socket. Heads and bodies
have the limits of the public server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import orjson
from envserver_records.errors import UsageError

from ..descriptors import raise_open_files
from ..proxy.asgi import HANGUPS, Hangups
from ..proxy.attempts import ProxyAttempt
from ..proxy.bounds import KEPT_CONNECTIONS, Connections, InFlight, OverBound
from ..proxy.egress import Egress
from ..proxy.egress_rules import MOST_HEAD_BYTES, asks_a_proxy
from ..proxy.server import Proxy, error_answer
from ..settings.server import ServerConfig
from .server import BoundedHttp, RunningServer, TooSlow, last_answer, serve_api

_WITHOUT_KEY: Final = 1024
"""Connections to the socket of all workers that have sent no key; honest ones send it at once."""
_SHORT_OF: Final = 0.75
"""Share of all descriptors from which on they are few."""


@dataclass
class _Listener:
    """One listening socket.

    Args:
        most, least: maximum connections without a key, always and with few descriptors.
        owner: whose socket it is, once known; None for the socket of all workers.
    """

    proxy: Proxy
    most: int
    least: int
    few_from: float
    is_shared: bool = False
    owner: InFlight | None = None
    without_key: Connections = field(default_factory=Connections)

    def came(self, connection: AgentHttp) -> None:
        most = self.least if connection.number > self.few_from else self.most
        closed = self.without_key.add(connection, most)
        if self.owner is not None:
            self.owner.refused("connections", closed)
        else:
            self.proxy.totals.refused["connections"] += closed

    def claim(self, connection: AgentHttp, owner: InFlight) -> None:
        self.without_key.discard(connection)
        if not self.is_shared:
            self.owner = owner
        owner.claim(connection, is_short=connection.number > self.few_from)


class AgentHttp(BoundedHttp):
    """A connection of an agent or a worker; see `proxy.bounds.Connection`."""

    most_discarded = 256 << 20
    """A client that is still sending when the connection closes does not see why it was refused."""
    number: int
    """Its descriptor: the lowest free one, so that a high one says that few are left."""

    def __init__(self, *args: Any, listener: _Listener, **more: Any) -> None:
        super().__init__(*args, **more)
        self._listener = listener
        self._owner: InFlight | None = None
        self._hangups = Hangups()

    @property
    def is_answered(self) -> bool:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return cycle.response_started or not cycle.more_body

    def drop(self, error: OverBound) -> None:
        if self._phase == "idle" and not self.is_answered:  # an error would answer the next request
            self.transport.close()
        else:
            self._refuse(error)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.number = transport.get_extra_info("socket").fileno()
        self._listener.proxy.totals.connections += 1
        self._listener.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.proxy.totals.connections -= 1
        self._listener.without_key.discard(self)
        if self._owner is not None:
            self._owner.connections.discard(self)
        super().connection_lost(exc)
        self._hangups.gone()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = self.scope["extensions"]
        extensions[HANGUPS] = self._hangups

    def head_came(self) -> None:
        owner = self._listener.proxy.in_flight(unquote(self.url.decode("latin-1")))
        if owner is None:
            return
        if self._owner is not None and self._owner is not owner:
            self._owner.connections.discard(self)
        self._owner = owner
        self._listener.claim(self, owner)

    def answer_to(self, error: UsageError) -> bytes:
        url = self.url.decode("latin-1") if self.scope is not None else ""
        status, body, headers = error_answer(url, error)
        content = orjson.dumps(body)
        length = b"%d" % len(content)
        about = ((b"content-type", b"application/json"), (b"content-length", length))
        return last_answer(status, (*about, *headers), content)

    def _refuse(self, error: UsageError) -> None:
        if isinstance(error, TooSlow) and not self._refused:
            self._listener.proxy.totals.refused["idle"] += 1
        super()._refuse(error)


@dataclass(eq=False, repr=False)
class ProxyServer:
    _running: RunningServer
    _proxy: Proxy
    _http: Any
    _few_from: float

    @property
    def port(self) -> int:
        return self._running.port

    @property
    def url(self) -> str:
        return self._running.url

    async def serve_worker(self, listener: socket.socket) -> asyncio.AbstractServer:
        """Also serves on the socket of one sandboxed worker, until the returned server is closed.
        At most `max_connections` of it may have sent no key."""
        most = self._proxy.bounds.max_connections
        place = _Listener(self._proxy, most, min(most, KEPT_CONNECTIONS), self._few_from)
        return await self._running.also_on(listener, partial(self._http, listener=place))

    async def close(self) -> None:
        await self._running.close()


async def serve_proxy(
    proxy: Proxy, http: ServerConfig | None = None, *, port: int = 0
) -> ProxyServer:
    """Serves `proxy` on a port (0: a free one) of the loopback address. `http`: sizes and times of
    requests; default: those of `ServerConfig`."""
    descriptors = raise_open_files()
    few_from = _SHORT_OF * descriptors
    bounds = (http or ServerConfig()).model_copy(update={"max_connections": descriptors})
    kind: Callable[..., AgentHttp] = AgentHttp
    if proxy.egress is not None:
        kind = partial(EgressHttp, egress=proxy.egress)
    # The number of connections is bounded here, for each attempt.
    of_all = partial(kind, bounds=bounds)
    least = min(_WITHOUT_KEY, descriptors // 16)
    shared = _Listener(proxy, _WITHOUT_KEY, least, few_from, is_shared=True)
    running = await serve_api(
        proxy.asgi(), "127.0.0.1", port, http=partial(of_all, listener=shared)
    )
    return ProxyServer(running, proxy, of_all, few_from)


class EgressHttp(AgentHttp):
    """See AgentHttp. `egress`: what answers requests for other hosts."""

    def __init__(self, *args: Any, egress: Egress, **more: Any) -> None:
        super().__init__(*args, **more)
        self._egress = egress
        self._first: bytes | None = b""
        """First bytes of a connection, until they tell its kind; None: it is the model proxy's."""

    def data_received(self, data: bytes) -> None:
        if self._first is None:
            super().data_received(data)
            return
        self._first += data
        is_egress = asks_a_proxy(self._first)
        if is_egress is None:
            return
        first, self._first = self._first, None
        if is_egress:
            self._hand_over(first)
        else:
            super().data_received(first)

    def _hand_over(self, first: bytes) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        reader = asyncio.StreamReader(limit=MOST_HEAD_BYTES, loop=self.loop)
        stream = _Stream(reader, self.connection_lost)
        writer = asyncio.StreamWriter(self.transport, stream, reader, self.loop)
        self.transport.set_protocol(stream)
        stream.connection_made(self.transport)
        reader.feed_data(first)
        self._serving = self.loop.create_task(
            self._egress.serve(reader, writer, self._listener.proxy.attempt_of, self._own)
        )
        stream.on_end = self._serving.cancel

    def _own(self, attempt: ProxyAttempt) -> None:
        self._owner = attempt.in_flight
        self._listener.claim(self, attempt.in_flight)


class _Stream(asyncio.StreamReaderProtocol):
    """A stream on a transport that had another protocol, which hears of its end."""

    def __init__(
        self, reader: asyncio.StreamReader, lost: Callable[[Exception | None], None]
    ) -> None:
        super().__init__(reader)
        self._lost = lost
        self.on_end: Callable[[], object] = lambda: None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost(exc)
        self.on_end()
