"""What a follower answers with: its own health and metrics, and the leader's answers.

A follower does itself, so that the leader need not: TLS, limits of connections, heads and bodies,
refusing unknown tokens, inflating posts, compressing answers, the page's files."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp
from envserver_records.errors import ConfigError, EnvserverError
from envserver_records.waiting import cancel_and_wait
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from ..dashboard import Dashboard
from ..http.access import AccessTokens
from ..http.answers import answer_to, error_answer
from ..http.health import CountedRequests, Health, Metrics, health_routes, metric_routes
from ..http.middleware import Access, KnownNames, Strangers
from ..http.requests import ABORT, SERVER_ENDS
from ..http.transfer import CompressedAnswers, Passed, RequestBodies, accepts
from ..settings.server import ServerConfig
from ..store.leadership import Leadership
from ..store.writer import Leader
from ..telemetry.process import LoopLag
from .bootstrap import PASSED, NoLeader, is_passed, leads_metric, origin_of, refuse_handshake, role

if TYPE_CHECKING:
    from ..store.leadership import Leadership


# A request is sent once. When no connection can be made it has not been sent (`NoLeader`, 503);
# when the connection breaks later it may have taken effect (`LeaderGone`, 502), and only its
# client, who knows whether repeating it is safe, may send it again.

CONNECT_SECONDS: Final = 2.0
_IDLE_SECONDS: Final = 4.0
"""Below the five seconds after which uvicorn closes an idle connection."""
_CHUNK_BYTES: Final = 256 * 1024
_OF_THE_HOP: Final = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade expect".split()
)
"""Headers about one connection, which are not passed on."""
_MADE_BY_AIOHTTP: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class LeaderGone(EnvserverError):
    kind, status = "leader_gone", 502


def no_leader() -> NoLeader:
    """Returns the answer while no server leads, or the leader cannot be reached."""
    return NoLeader(
        "No server is the leader at the moment.",
        hint="Another server takes over within seconds: send the request again.",
        retry_after_seconds=1,
    )


class LeaderLink:
    def __init__(self, leadership: Leadership, settings: ServerConfig) -> None:
        self._leadership = leadership
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[asyncio.Timeout, str] = {}

    async def __aenter__(self) -> LeaderLink:
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=_tls(self._settings)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_MADE_BY_AIOHTTP,
            read_bufsize=_CHUNK_BYTES,
        )
        # aiohttp repeats a GET whose connection broke. Here GET may change something, and the
        # leader may have had it: `GET /batch` hands groups out.
        self._session._retry_connection = False
        self._leadership.changed = self._leave_others
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    def leader_for(self, scope: Scope) -> Leader:
        leader = self._leadership.leader
        if leader is None or is_passed(scope):
            raise no_leader()
        return leader

    @asynccontextmanager
    async def bound(self, leader: Leader) -> AsyncIterator[asyncio.Timeout]:
        """Ends the body with TimeoutError when another server leads (a leader that is stopped
        keeps its connections, and answers nothing), or after `end`."""
        async with asyncio.timeout(None) as limit:
            self._open[limit] = leader.owner
            try:
                yield limit
            finally:
                del self._open[limit]

    def _leave_others(self, owner: str) -> None:
        for limit, of in self._open.items():
            if of != owner:
                end(limit)

    @asynccontextmanager
    async def sent(
        self, leader: Leader, scope: Scope, body: AsyncIterator[bytes] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request; yields the answer's head."""
        try:
            async with self.session.request(
                scope["method"],
                url_of(leader, scope),
                headers=headers_of(leader, scope),
                data=body,
                allow_redirects=False,
            ) as response:
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise no_leader() from None
        except (aiohttp.ClientError, OSError) as error:
            raise gone(error) from None

    async def probe(self) -> str:
        """Returns "" if the leader answers, else why not."""
        leader = self._leadership.leader
        if leader is None:
            return "no server leads"
        url = URL(leader.url) / "healthz"
        timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        try:
            async with self.session.get(url, timeout=timeout) as response:
                return "" if response.status == 200 else f"{leader.url} answers {response.status}"
        except (aiohttp.ClientError, OSError):
            return f"{leader.url} does not answer"


def end(limit: asyncio.Timeout, seconds: float = 0.0) -> None:
    """Lets `limit` end its body `seconds` from now."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time() + seconds)


def gone(error: Exception) -> LeaderGone:
    """Returns the error for a connection that broke after the request was sent."""
    return LeaderGone(
        f"The leader disconnected ({type(error).__name__}); the request may have been done.",
        hint="Send it again: a request that arrives twice counts once.",
    )


def url_of(leader: Leader, scope: Scope) -> URL:
    """Returns the address of a request at the leader, with its path and query as they were sent."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    return URL(f"{leader.url}{path}{'?' if query else ''}{query}", encoded=True)


def headers_of(leader: Leader, scope: Scope) -> list[tuple[str, str]]:
    named = {
        part.strip().lower()
        for name, value in scope["headers"]
        if name == b"connection"
        for part in value.split(b",")
    }
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _OF_THE_HOP and name not in named
    ]
    kept.append((PASSED, origin_of(scope, leader.owner)))
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in kept]


def answer_headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower() not in _OF_THE_HOP and name.lower() != b"date"
    ]


def is_disconnect(message: Message) -> bool:
    return message["type"] in ("http.disconnect", "websocket.disconnect")


def _tls(settings: ServerConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.advertise_ca_certs)
        if settings.ssl_cert_reqs != "none" and settings.ssl_certfile is not None:
            password = settings.ssl_keyfile_password
            context.load_cert_chain(
                settings.ssl_certfile,
                settings.ssl_keyfile,
                password.get_secret_value() if password is not None else None,
            )
    except OSError as error:
        raise ConfigError(f"A certificate for the leader cannot be used: {error}.") from None
    return context


_TRY_AGAIN: Final = 1013
_BROKE_OFF: Final = 1011
_HANDSHAKE: Final = ("sec-websocket-", "host")
"""Beginnings of the names of headers that the connection to the leader makes anew."""


async def pass_socket(link: LeaderLink, scope: Scope, receive: Receive, send: Send) -> None:
    """Passes one WebSocket on until either side ends it; it does not survive its leader."""
    await receive()  # websocket.connect
    accepted = False
    try:
        leader = link.leader_for(scope)
        headers = [
            (name, value)
            for name, value in headers_of(leader, scope)
            if not name.startswith(_HANDSHAKE)
        ]
        connecting = link.session.ws_connect(
            url_of(leader, scope),
            headers=headers,
            protocols=scope.get("subprotocols", ()),
            max_msg_size=0,
        )
        async with link.bound(leader), connecting as socket:
            await send({"type": "websocket.accept", "subprotocol": socket.protocol})
            accepted = True
            code = await _both_ways(socket, receive, send)
    except aiohttp.WSServerHandshakeError as refusal:
        await _refuse(refusal, send)
        return
    except (EnvserverError, aiohttp.ClientError, OSError):
        if accepted:
            await send({"type": "websocket.close", "code": _TRY_AGAIN})
        else:
            await _refuse(no_leader(), send)
        return
    if code is not None:
        await send({"type": "websocket.close", "code": code})


async def _refuse(why: EnvserverError | aiohttp.WSServerHandshakeError, send: Send) -> None:
    answer = error_answer("/v1", why.status, why.message, headers={"retry-after": "1"})
    await refuse_handshake(answer, send)


async def _both_ways(
    socket: aiohttp.ClientWebSocketResponse, receive: Receive, send: Send
) -> int | None:
    """Returns the leader's close code; None if the client ended the session."""
    there = asyncio.create_task(_to_leader(socket, receive))
    back = asyncio.create_task(_to_client(socket, send))
    try:
        await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(there, back)
    if there.cancelled():
        return socket.close_code if back.exception() is None else _BROKE_OFF
    there.result()
    return None


async def _to_leader(socket: aiohttp.ClientWebSocketResponse, receive: Receive) -> None:
    while not is_disconnect(message := await receive()):
        if message.get("text") is not None:
            await socket.send_str(message["text"])
        elif message.get("bytes") is not None:
            await socket.send_bytes(message["bytes"])


async def _to_client(socket: aiohttp.ClientWebSocketResponse, send: Send) -> None:
    async for message in socket:
        passed: Message = {"type": "websocket.send"}
        if message.type is aiohttp.WSMsgType.TEXT:
            passed["text"] = message.data
        elif message.type is aiohttp.WSMsgType.BINARY:
            passed["bytes"] = message.data
        else:
            continue
        await send(passed)


_ROUTE: Final = Passed("passed on")
"""The route under which passed requests are counted."""
COMPRESSED: Final = "envserver.compressed"
"""Key in a scope: whether a middleware compresses answers, which it can if they are one message."""
_AT_ONCE_BYTES: Final = 512 * 1024
_COMPRESSED_BYTES: Final = 256 * 1024 * 1024
"""Larger answers are streamed as they are."""
_BINARY: Final = "application/vnd."
_END_SECONDS: Final = 1.0
"""For requests that are under way when this server stops."""


class PassedOn:
    """The innermost application of a follower."""

    def __init__(self, link: LeaderLink) -> None:
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await pass_socket(self._link, scope, receive, send)
            return
        scope["route"] = _ROUTE
        exchange = _Exchange(scope, receive, send)
        try:
            await exchange.run(self._link)
        except EnvserverError as error:
            await exchange.fail(error)


class _Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_ended = asyncio.Event()
        self._client_left = False
        self._begun = False

    async def run(self, link: LeaderLink) -> None:
        leader = link.leader_for(self._scope)
        watching: asyncio.Task[None] | None = None
        try:
            async with link.bound(leader) as limit:
                watching = asyncio.create_task(self._watch(limit))
                async with link.sent(leader, self._scope, self._body()) as response:
                    await self._answer(response)
        except TimeoutError as error:  # the client left, this server ends, or another one leads
            if not self._client_left:
                raise gone(error) from None
        finally:
            if watching is not None:
                watching.cancel()

    async def fail(self, error: EnvserverError) -> None:
        """Answers with an error; cuts an answer that has begun."""
        if self._client_left:
            return
        if self._begun:
            self._scope["extensions"][ABORT]["abort"]()
            return
        # A line for each client that waits for a leader would fill the log.
        answer = answer_to(self._scope["path"], error)
        await answer(self._scope, self._receive, self._send)

    def _body(self) -> AsyncIterator[bytes] | None:
        headers = Headers(scope=self._scope)
        if "content-length" in headers or "transfer-encoding" in headers:
            return self._chunks()
        self._body_ended.set()
        return None

    async def _chunks(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if is_disconnect(message):
                self._client_left = True
                raise ConnectionError("The client disconnected while sending its request.")
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)
        self._body_ended.set()

    async def _watch(self, limit: asyncio.Timeout) -> None:
        """Ends the exchange when the client leaves: the leader sees it leave, too."""
        await self._body_ended.wait()
        while not is_disconnect(message := await self._receive()):
            pass
        self._client_left = not message.get(SERVER_ENDS)
        end(limit, 0.0 if self._client_left else _END_SECONDS)

    def _most_at_once(self, response: aiohttp.ClientResponse) -> int:
        is_text = not response.content_type.startswith(_BINARY)
        return _COMPRESSED_BYTES if is_text and self._scope.get(COMPRESSED) else _AT_ONCE_BYTES

    async def _answer(self, response: aiohttp.ClientResponse) -> None:
        headers = answer_headers(response)
        start: Message = {
            "type": "http.response.start",
            "status": response.status,
            "headers": headers,
        }
        if (response.content_length or math.inf) <= self._most_at_once(response):
            body = await response.read()
            self._begun = True
            await self._send(start)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
            return
        self._begun = True
        await self._send(start)
        async for chunk in response.content.iter_any():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def follower_app(
    leadership: Leadership, link: LeaderLink, settings: ServerConfig, lag: LoopLag
) -> ASGIApp:
    health = Health(lag)
    health.role = partial(role, leadership)
    health.found("leader", link.probe)
    metrics = Metrics()
    metrics.watch(lag, health)
    metrics.add(partial(leads_metric, leadership))
    app: ASGIApp = _routes(health, metrics, link, settings)
    if settings.tokens_file is not None:
        tokens, strangers = AccessTokens(settings.tokens_file), Strangers()
        app = Access(app, tokens, None, strangers, settings.quota)
    app = Dashboard(app)
    if settings.tokens_file is None:
        app = KnownNames(app, settings.allowed_hosts)
    return CountedRequests(app, metrics.requests)


def _routes(health: Health, metrics: Metrics, link: LeaderLink, settings: ServerConfig) -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.include_router(health_routes(health))
    app.include_router(metric_routes(metrics))
    passed = PassedOn(link)
    bodies = RequestBodies(passed, max_body_bytes=settings.max_body_bytes, smaller={})
    app.mount("/", CompressedAnswers(_Plain(passed, bodies)))
    return app


class _Plain:
    """Lets the leader get and send plain bodies; what need not be inflated is streamed."""

    def __init__(self, streamed: ASGIApp, inflated: ASGIApp) -> None:
        self._streamed = streamed
        self._inflated = inflated

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._streamed(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[COMPRESSED] = accepts(headers, "gzip")
        codings = "zstd" if accepts(headers, "zstd") else "identity"
        kept = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        scope["headers"] = [*kept, (b"accept-encoding", codings.encode())]
        packed = "gzip" in headers.get("content-encoding", "").lower()
        await (self._inflated if packed else self._streamed)(scope, receive, send)
