"""Starts the first parts of `serve` and `run-api`: the store, the port, health and metrics.

Starts first and stops last, so that health and metrics can be read at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final

from starlette.types import ASGIApp

from ..api.bootstrap import BootstrapApp
from ..api.health import Health, disk_probe, store_probe
from ..api.live import Live
from ..api.metrics import Metrics
from ..api.server import RunningServer, serve_api
from ..config import StorePlace
from ..server_config import ServerConfig, TelemetryConfig
from ..store import GroupStore, open_store
from ..store.reserve import RESERVE_BYTES
from ..telemetry.lag import LoopLag

_ROUTES: Final = "routes"
"""The part that is ready when every route serves: until then they answer 503."""

_DATABASE_SECONDS: Final = 60.0
"""How long a PostgreSQL may take to start that was started together with this server."""


class BootstrapServer:
    """An open store and a server that reports that it is starting; made by `bootstrap_server`."""

    def __init__(
        self,
        store: GroupStore,
        health: Health,
        lag: LoopLag,
        app: BootstrapApp,
        server: RunningServer,
    ) -> None:
        self.store = store
        self.health = health
        self.metrics = Metrics()
        self.live = Live()
        self.metrics.watch(lag, health)
        self._lag = lag
        self._app = app
        self._server = server

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def url(self) -> str:
        """See RunningServer."""
        return self._server.url

    async def open(self, api: ASGIApp) -> None:
        """Lets `api` answer requests from now on; raises what `api` raises while it starts."""
        await self._app.open(api)
        self.health.found(_ROUTES)
        self._lag.begin_anew()

    async def close(self) -> None:
        """Answers waiting requests and takes no others. Calling it twice does no harm."""
        self._app.close()
        await self._server.close()


@contextlib.asynccontextmanager
async def bootstrap_server(
    server: ServerConfig, telemetry: TelemetryConfig, store: StorePlace, expected: Sequence[str]
) -> AsyncIterator[BootstrapServer]:
    """Opens the store and starts the server.

    Args:
        expected: parts other than the store that must be up before the server is ready.

    Raises:
        ConfigError: the port is not available.
        StoreError: the store cannot be opened.
    """
    async with (
        LoopLag(telemetry.slow_callback_seconds) as lag,
        open_store(store, wait_seconds=_DATABASE_SECONDS, reserve_bytes=RESERVE_BYTES) as opened,
    ):
        health = Health(lag)
        health.found("store", store_probe(opened))
        health.found("disk", disk_probe(opened), failing="limited")
        for part in (*expected, _ROUTES):
            health.expect(part)
        app = BootstrapApp(health)
        running = await serve_api(app, server.host, server.port, server)
        bootstrap = BootstrapServer(opened, health, lag, app, running)
        watching = asyncio.create_task(health.watch(), name="health")
        try:
            yield bootstrap
        finally:
            watching.cancel()
            await bootstrap.close()


@contextlib.asynccontextmanager
async def beside(name: str, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work`, which never ends by itself, in the background of the block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
