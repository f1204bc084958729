"""The simulated engine over HTTP, with vLLM's paths.

Invariants: every answer names its maker (`server: envserver-sim`); a wrong request gets an
OpenAI-style error with HTTP 4xx. A simulated disconnect closes the connection in the middle of the
body, as a server that died does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
import uvicorn
from envserver_records.errors import ConfigError, EngineRefused
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from envserver.settings.config import SimConfig

from .answers import FINGERPRINT, Plan
from .engine import FAILED, SimEngine
from .policy import Solver

_HEADERS = {"server": FINGERPRINT}
_POSTS = ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize")
_GETS = ("/v1/models", "/version", "/health")
_SECONDS_FOR_OPEN_REQUESTS = 2


def sim_app(engine: SimEngine) -> Starlette:
    async def post(request: Request) -> Response:
        try:
            plan = engine.plan(request.url.path, await decoded(request))
        except EngineRefused as error:
            return error_answer(error, _HEADERS)
        await asyncio.sleep(engine.latency_seconds)
        if plan.fault == "error":
            failure = EngineRefused(FAILED, status=500)
            return error_answer(failure, _HEADERS)
        if plan.stream:
            return _CutOff(_events(engine, plan), media_type="text/event-stream", headers=_HEADERS)
        await asyncio.sleep(engine.token_seconds(plan.tokens))
        answer = plan.answer.whole()
        if plan.fault == "disconnect":
            half = _half(orjson.dumps(answer))
            return _CutOff(half, media_type="application/json", headers=_HEADERS)
        return json_answer(answer, headers=_HEADERS)

    async def get(request: Request) -> Response:
        return json_answer(await engine.get(request.url.path), headers=_HEADERS)

    return Starlette(
        routes=[
            *(Route(path, post, methods=["POST"]) for path in _POSTS),
            *(Route(path, get, methods=["GET"]) for path in _GETS),
        ],
        exception_handlers={404: _missing, 405: _missing},
        middleware=[Middleware(ProgramsOnly)],
    )


async def serve_sim(
    config: SimConfig,
    host: str,
    port: int,
    solver: Solver | None = None,
    *,
    listening: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until `stop` is set (open requests get two seconds) or the task is cancelled.

    Port 0 takes a free one. `listening` is called with the base URL (with /v1) as soon as
    connections are accepted.
    """
    with listening_socket(host, port) as listener:
        server = QuietServer(
            uvicorn.Config(
                sim_app(SimEngine(config, solver)),
                # A connection broken on purpose is an error in uvicorn's eyes: its log stays quiet.
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=_SECONDS_FOR_OPEN_REQUESTS,
            )
        )
        if listening is not None:
            listening(url_of(host, listener))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            server.should_exit = True
            await serving


class _CutOff(StreamingResponse):
    """A streamed response in which an empty part breaks the connection."""

    async def stream_response(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async for part in self.body_iterator:
            if not part:
                # An application that returns before its last part makes the server hang up.
                return
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(engine: SimEngine, plan: Plan) -> AsyncIterator[bytes]:
    for chunk in plan.chunks():
        if chunk is None:
            yield b""
            return
        await asyncio.sleep(engine.token_seconds(1))
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _half(payload: bytes) -> AsyncIterator[bytes]:
    yield payload[: len(payload) // 2]
    yield b""


async def _missing(request: Request, error: Exception) -> Response:
    return error_answer(missing(request, error), _HEADERS)


# What this engine shares with the one on transformers: sockets, decoding, OpenAI-style errors.

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
