"""The application of `envserver sandboxes serve`: sandboxes for servers and runners.

    GET /v1/sandboxes               how busy the machine is (sandbox.machine_messages.Load)
    GET /v1/sandboxes (WebSocket)   one sandbox, until the connection ends

Both need a token of the role `environment`; without a tokens file only this machine can connect."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Final

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..http.access import ENVIRONMENT, EVERYBODY, READERS, AccessTokens, Rule, Sessions
from ..http.answers import answer_errors, json_answer
from ..http.health import CountedRequests, Health, Metrics, health_routes, metric_routes
from ..http.middleware import Access, KnownNames, Strangers
from ..sandbox.machine import SandboxMachine
from ..sandbox.machine_messages import PATH, Load
from ..settings.server import ServerConfig
from ..telemetry.measures import Reading
from ..version import __version__

RULES: Final = (
    Rule("GET", "/healthz", None),
    Rule("GET", "/readyz", EVERYBODY),
    Rule("GET", "/metrics", READERS),
    Rule("GET", PATH, ENVIRONMENT),
)
_BY_PATH: Final = {rule.path: {rule.method: rule} for rule in RULES}


def create_sandbox_api(
    machine: SandboxMachine, settings: ServerConfig, metrics: Metrics, health: Health
) -> ASGIApp:
    app = FastAPI(
        title="envserver sandboxes",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    answer_errors(app)

    @app.get(PATH, response_model=None)
    async def load() -> object:
        """Returns how busy the machine is."""
        return json_answer(msgspec.structs.asdict(machine.load))

    @app.websocket(PATH)
    async def sandbox(websocket: WebSocket) -> None:
        """Serves one sandbox."""
        await websocket.accept()
        link = _ServerLink(websocket)
        await machine.converse(link)
        await link.close()

    app.include_router(health_routes(health))
    metrics.add(partial(_numbers, machine))
    app.include_router(metric_routes(metrics))
    if settings.tokens_file is None:
        app.add_middleware(KnownNames, names=settings.allowed_hosts)
    else:
        tokens = AccessTokens(settings.tokens_file)
        app.add_middleware(
            Access,
            tokens=tokens,
            sessions=Sessions(tokens, secrets.token_bytes(32)),  # without logins
            strangers=Strangers(),
            quota=settings.quota,
            rules=lambda path: _BY_PATH.get(path, {}),
        )
    app.add_middleware(CountedRequests, requests=metrics.requests)
    return app


class _ServerLink:
    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def send(self, piece: bytes) -> None:
        try:
            await self._websocket.send_bytes(piece)
        except (WebSocketDisconnect, RuntimeError) as error:  # starlette raises either
            raise ConnectionError("the client is gone") from error

    async def receive(self) -> bytes:
        message = await self._websocket.receive()
        return message.get("bytes") or b"" if message["type"] == "websocket.receive" else b""

    async def close(self) -> None:
        try:
            await self._websocket.close()
        except (WebSocketDisconnect, RuntimeError):
            return


async def _numbers(machine: SandboxMachine) -> Reading:
    load: Load = machine.load
    return {
        "sandboxes_open": load.open,
        "sandboxes_waiting": load.waiting,
        "sandboxes_limit": load.sandboxes,
        "sandbox_programs_running": load.running,
        "sandbox_programs_queued": load.queued,
        "sandbox_programs_limit": load.room,
        "sandbox_programs": machine.ended,
        "sandbox_programs_cpu_seconds": machine.cpu_seconds,
    }
