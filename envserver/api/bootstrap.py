"""The bootstrap server, which answers before the API is ready, and requests of followers.

While the server starts, health routes answer, browsers get the page, and all other requests get
503. When the server shuts down, waiting requests (long polls, streams) see a disconnected client,
so that they finish at once and in order."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING, Any, Final

from envserver_records.errors import EnvserverError
from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from ..dashboard import Dashboard
from ..http.answers import answer_to, error_answer
from ..http.health import Health, health_routes
from ..http.requests import SERVER_ENDS
from ..http.server import Lifespan
from ..telemetry.measures import Reading

if TYPE_CHECKING:
    from ..store.leadership import Leadership

_RETRY_SECONDS: Final = "1"
_RUNS: Final = "/v1/runs/"
_MOST_NAME: Final = 80
"""Maximum length of a run's name in a log line."""
_DISCONNECT: Final[Message] = {"type": "http.disconnect", SERVER_ENDS: True}


class BootstrapApp:
    """An ASGI application that wraps another one that becomes available later."""

    def __init__(self, health: Health, meanwhile: ASGIApp | None = None) -> None:
        self._early = meanwhile or _early(health)
        self._inside: ASGIApp | None = None
        self._lifespan: Lifespan | None = None
        self._closing = asyncio.Event()

    async def open(self, app: ASGIApp) -> None:
        """Starts `app`, which answers requests from now on."""
        lifespan = Lifespan(app)
        await lifespan.start()
        self._inside, self._lifespan = app, lifespan

    def close(self) -> None:
        """Tells waiting requests to finish."""
        self._closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            if scope["path"].startswith(_RUNS):
                run = scope["path"].removeprefix(_RUNS).partition("/")[0]
                bind_contextvars(run=run[:_MOST_NAME])
            await _Visit(self._closing, receive, send).to(self._inside or self._early, scope)
        else:  # a WebSocket, which the HTTP server ends with itself
            await (self._inside or self._early)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._lifespan is not None:
            await self._lifespan.stop()
        await send({"type": "lifespan.shutdown.complete"})


class _Visit:
    def __init__(self, closing: asyncio.Event, receive: Receive, send: Send) -> None:
        self._closing = closing
        self._receive_message = receive
        self._send_message = send
        self._has_body = False
        self._begun = False
        self._ended = False
        self._gone: asyncio.Future[Message] | None = None

    async def to(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            if self._gone is not None:
                self._gone.cancel()
        if self._closing.is_set() and self._begun and not self._ended:
            # The stream stopped because it saw a disconnect, but the client is there: end the body.
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _receive(self) -> Message:
        if not self._has_body:
            message = await self._receive_message()
            self._has_body = not message.get("more_body", False)
            return message
        if self._closing.is_set():
            return _DISCONNECT
        # One shared receive task: a caller that only polls for a disconnect need not wait for it.
        self._gone = self._gone or asyncio.ensure_future(self._receive_message())
        closing = asyncio.ensure_future(self._closing.wait())
        first: set[asyncio.Future[Any]] = {self._gone, closing}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        return self._gone.result() if self._gone.done() else _DISCONNECT

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send_message(message)


def _early(health: Health) -> ASGIApp:
    app = FastAPI(openapi_url=None)
    app.include_router(health_routes(health))

    async def too_early(scope: Scope, receive: Receive, send: Send) -> None:
        words = f"The server is starting: {health.missing() or 'a moment'}."
        headers = {"retry-after": _RETRY_SECONDS}
        answer = error_answer(scope["path"], 503, words, kind="starting", headers=headers)
        await answer(scope, receive, send)

    app.mount("/", too_early)
    return Dashboard(app)  # the page says that the server starts, and goes on by itself


# The header tells the leader the address and the scheme that the follower saw, so quotas, refused
# tokens and logs are about the client. It counts only with the leader's id, which only readers of
# the store know; a request with another id is refused (`no_leader`). So no client can pass as
# another one, and a server at a former leader's address serves no followers of another store.

PASSED: Final = b"x-envserver-passed-on"
_SCHEMES: Final = {"http": "ws", "https": "wss"}


class NoLeader(EnvserverError):
    kind, status = "no_leader", 503


def is_passed(scope: Scope) -> bool:
    """Returns whether a follower sent this request: it is not passed on a second time."""
    return any(name == PASSED for name, _ in scope["headers"])


def origin_of(scope: Scope, owner: str) -> bytes:
    host, port = scope.get("client") or ("", 0)
    scheme = "https" if scope.get("scheme") in ("https", "wss") else "http"
    return f"{owner};{scheme};{port};{host}".encode("latin-1", "replace")


class FromFollowers:
    """The outermost middleware of a server that leads, or is alone. `owner`: the leader's id; None:
    it shares no store, so no server follows it."""

    def __init__(self, app: ASGIApp, owner: str | None) -> None:
        self._app = app
        self._owner = None if owner is None else owner.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and is_passed(scope):
            values = [value for name, value in scope["headers"] if name == PASSED]
            headers = [(name, value) for name, value in scope["headers"] if name != PASSED]
            # The scope itself changes: the server reads from it after the request.
            scope["headers"] = headers
            if not self._restored(scope, values):
                await _refuse_passed_on(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _restored(self, scope: Scope, values: list[bytes]) -> bool:
        """Sets the client's address and scheme; returns False if the header is not for us."""
        owner, _, rest = values[0].partition(b";")
        known = self._owner is not None and hmac.compare_digest(owner, self._owner)
        if len(values) != 1 or not known:
            return False
        scheme, port, host = rest.decode("latin-1").split(";", 2)
        scope["client"] = (host, int(port))
        scope["scheme"] = _SCHEMES[scheme] if scope["type"] == "websocket" else scheme
        return True


async def _refuse_passed_on(scope: Scope, receive: Receive, send: Send) -> None:
    error = NoLeader(
        "This server is not the leader, but another server passed this request on to it.",
        hint="Send it again; the header x-envserver-passed-on is for servers that share a store.",
        retry_after_seconds=1,
    )
    answer = answer_to(scope["path"], error)
    if scope["type"] == "http":
        await answer(scope, receive, send)
        return
    await receive()  # websocket.connect
    await refuse_handshake(answer, send)


async def refuse_handshake(answer: Response, send: Send) -> None:
    """Answers a WebSocket's handshake with an HTTP error."""
    head = {"status": answer.status_code, "headers": answer.raw_headers}
    await send({"type": "websocket.http.response.start", **head})
    await send({"type": "websocket.http.response.body", "body": bytes(answer.body)})


def role(leadership: Leadership) -> dict[str, object]:
    if leadership.leads:
        return {"role": "leader", "leader": leadership.url}
    leader = leadership.leader
    return {"role": "follower", "leader": None if leader is None else leader.url}


async def leads_metric(leadership: Leadership) -> Reading:
    followers = {"followers": len(leadership.followers)} if leadership.leads else {}
    return {"leader": leadership.leads, **followers}
