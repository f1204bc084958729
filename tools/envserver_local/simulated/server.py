"""The simulated engine over HTTP, with vLLM's paths.

What always holds: every answer names its maker (`server: envserver-sim`); a wrong request gets an
OpenAI-style error with HTTP 4xx. A simulated disconnect closes the connection in the middle of the
body, as a server that died does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
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
from starlette.types import Send

from envserver.settings.config import SimConfig

from .answers import FINGERPRINT, Plan
from .engine import ProgramsOnly, SimEngine
from .policy import Solver

_HEADERS = {"server": FINGERPRINT}
_POSTS = ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize")
_GETS = ("/v1/models", "/version", "/health")
_STATUS_NAMES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
_SECONDS_FOR_OPEN_REQUESTS = 2
_BACKLOG = 1024


def sim_app(engine: SimEngine) -> Starlette:
    async def post(request: Request) -> Response:
        try:
            plan = engine.plan(request.url.path, _decoded(await request.body()))
        except EngineRefused as error:
            return _error(int(error.detail["status"]), error.message, error.detail.get("param"))
        await asyncio.sleep(engine.latency_seconds)
        if plan.fault == "error":
            return _error(500, "The simulated engine failed, as its error_rate asks.", None)
        if plan.stream:
            return _CutOff(_events(engine, plan), media_type="text/event-stream", headers=_HEADERS)
        await asyncio.sleep(engine.token_seconds(plan.tokens))
        payload = orjson.dumps(plan.answer.whole())
        if plan.fault == "disconnect":
            return _CutOff(_half(payload), media_type="application/json", headers=_HEADERS)
        return Response(payload, media_type="application/json", headers=_HEADERS)

    async def get(request: Request) -> Response:
        payload = orjson.dumps(await engine.get(request.url.path))
        return Response(payload, media_type="application/json", headers=_HEADERS)

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
    """Serves until `stop` is set or the task is cancelled.

    Args:
        port: 0 takes a free one.
        listening: called with the base URL (with /v1) as soon as connections are accepted.
        stop: set it to stop; open requests get two seconds.
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
            name = f"[{host}]" if ":" in host else host
            listening(f"http://{name}:{listener.getsockname()[1]}/v1")
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            server.should_exit = True
            await serving


class QuietServer(uvicorn.Server):
    """A server that leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that accepts connections at `host`; port 0 takes a free one."""
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


def _error(status: int, message: str, param: str | None) -> Response:
    kind = _STATUS_NAMES.get(status, "BadRequestError")
    error = {"message": message, "type": kind, "param": param, "code": status}
    payload = orjson.dumps({"error": error})
    return Response(payload, status, _HEADERS, media_type="application/json")


async def _missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _error(status, f"There is no {request.method} {request.url.path}.", None)


def _decoded(payload: bytes) -> Any:
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise EngineRefused(f"The body is not JSON: {error}.", status=400) from error
