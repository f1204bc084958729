"""The bootstrap server: answers at the port before the API is ready, and while it shuts down.

While the server starts, health routes answer, browsers get the page, and all other requests get
503. When the server shuts down, waiting requests (long polls, streams) see a disconnected client,
so that they finish at once and in order.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from ..dashboard import Dashboard
from ..http.answers import error_answer
from ..http.health import Health, health_routes
from ..http.requests import SERVER_ENDS
from ..http.server import Lifespan

_RETRY_SECONDS: Final = "1"
_RUNS: Final = "/v1/runs/"
_MOST_NAME: Final = 80
"""Maximum length of a run's name in a log line."""
_DISCONNECT: Final[Message] = {"type": "http.disconnect", SERVER_ENDS: True}


class BootstrapApp:
    """An ASGI application that wraps another one that becomes available later.

    Args:
        meanwhile: answers until then; default: health, the page, and 503.
    """

    def __init__(self, health: Health, meanwhile: ASGIApp | None = None) -> None:
        self._early = meanwhile or _early(health)
        self._inside: ASGIApp | None = None
        self._lifespan: Lifespan | None = None
        self._closing = asyncio.Event()

    async def open(self, app: ASGIApp) -> None:
        """Starts `app`, which answers requests from now on.
        Raises Exception: whatever `app` raised while starting.
        """
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
    """One request."""

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
