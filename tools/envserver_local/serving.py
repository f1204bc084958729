"""What the two engines share over HTTP: sockets, decoding, OpenAI-style errors, no browsers."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
import uvicorn
from envserver_records.errors import ConfigError, EngineRefused
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_BACKLOG = 1024
_STATUS_NAMES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


class QuietServer(uvicorn.Server):
    """Leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening_socket(host: str, port: int) -> socket.socket:
    """Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is: without,
    # every answer waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen at {host}:{port}: {error.strerror or error}.") from error
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    """The base URL of a listening engine, with /v1."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/v1"


class ProgramsOnly:
    """Middleware that refuses pages in a browser."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(map(_is_of_a_page, scope["headers"])):
            message = "This engine answers programs, not pages in a browser."
            error = {"message": message, "type": "PermissionDenied", "code": 403}
            body = orjson.dumps({"error": error})
            answer = Response(body, 403, media_type="application/json")
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_of_a_page(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name == b"origin" or (name == b"sec-fetch-site" and value != b"none")


async def decoded(request: Request) -> Any:
    try:
        return orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise EngineRefused(f"The body is not JSON: {error}.", status=400) from error


def error_body(error: EngineRefused) -> dict[str, Any]:
    """`error` as OpenAI's API writes it."""
    status = int(error.detail.get("status", 400))
    problem = {
        "message": error.message,
        "type": _STATUS_NAMES.get(status, "BadRequestError"),
        "param": error.detail.get("param"),
        "code": status,
    }
    return {"error": problem}


def json_answer(
    payload: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(payload), status, headers, media_type="application/json")


def error_answer(error: EngineRefused, headers: Mapping[str, str] | None = None) -> Response:
    body = error_body(error)
    return json_answer(body, body["error"]["code"], headers)


def missing(request: Request, error: Exception) -> EngineRefused:
    """The error for a path or a method that the engine does not have."""
    status = getattr(error, "status_code", 404)
    return EngineRefused(f"There is no {request.method} {request.url.path}.", status=status)
