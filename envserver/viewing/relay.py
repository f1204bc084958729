"""The page of a server elsewhere, read with the token of ENVSERVER_TOKEN.

In: GETs of the page. Out: the server's answers. What holds: only routes that a reader may read are
asked for; the browser never sees the token, and the server never sees the browser's headers but
the few in `_PASSED`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import httpx
from envserver_records.errors import EnvserverError
from envserver_records.servers import AsyncServersClient
from envserver_records.urls import authorization
from fastapi import APIRouter, FastAPI
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .. import __version__
from ..api import problems
from ..api.access.rules import rules_of
from ..api.native.session import add_session_routes
from .app import guard

_PASSED: Final = ("accept", "accept-encoding", "last-event-id")
_RETURNED: Final = (
    *("content-type", "content-encoding", "cache-control", "retry-after", "vary"),
    "x-accel-buffering",
)
_CONNECT_SECONDS: Final = 10.0
_READ_SECONDS: Final = 60.0
"""Longer than a stream of events is silent."""


class ServerOutOfReach(EnvserverError):
    """The server that is looked at does not answer."""

    kind, status = "server_out_of_reach", 502


def create_relay(url: str, http: httpx.AsyncClient) -> FastAPI:
    """Builds the application over a server.

    Args:
        http: speaks to the server at `url`, with its token.
    """
    app = FastAPI(title="envserver view", version=__version__, docs_url=None, redoc_url=None)
    problems.install(app)

    router = APIRouter()
    add_session_routes(router, None)
    app.include_router(router)

    @app.get("/{path:path}")
    async def relay(path: str, request: Request) -> Response:
        if not _is_readable(f"/{path}"):
            return problems.error_answer(f"/{path}", 404, "There is no such thing to read.")
        return await _relayed(http, url, request)

    guard(app)
    return app


def client_of(url: str) -> httpx.AsyncClient:
    """Returns a client of the server, which follows no redirects: they could take the token
    elsewhere."""
    timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
    return AsyncServersClient(url, headers=authorization(), timeout=timeout)


def _is_readable(path: str) -> bool:
    rule = rules_of(path).get("GET")
    is_for_readers = rule is not None and (rule.roles is None or "reader" in rule.roles)
    return path.startswith("/v1/") and is_for_readers and rule is not None and not rule.is_change


async def _relayed(http: httpx.AsyncClient, url: str, request: Request) -> Response:
    headers = {name: value for name in _PASSED if (value := request.headers.get(name))}
    raw = request.scope["raw_path"].decode("ascii")
    path = raw.lstrip("/") + (f"?{request.url.query}" if request.url.query else "")
    asked = http.build_request("GET", path, headers=headers)
    try:
        answer = await http.send(asked, stream=True)
    except httpx.TransportError as error:
        raise ServerOutOfReach(
            f"{url} does not answer: {error or type(error).__name__}."
        ) from error
    kept = {name: value for name in _RETURNED if (value := answer.headers.get(name))}
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        await answer.aclose()
        raise ServerOutOfReach(
            f"{url} asks for an access token.", hint="ENVSERVER_TOKEN holds it; then start again."
        )
    return StreamingResponse(
        _parts(answer), answer.status_code, kept, background=BackgroundTask(answer.aclose)
    )


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx.TransportError:
        return  # the browser sees a short answer, and asks again
