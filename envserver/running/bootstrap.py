"""Starts the first parts of `serve` and `run-api`: the store, the port, health and metrics.
They start first and stop last, so health and metrics can be read at any time. A server that shares
its store answers before it has the store: it passes requests on until it leads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envserver_records.errors import ConfigError
from starlette.types import ASGIApp

from ..api.bootstrap import BootstrapApp, FromFollowers, leads_metric, role
from ..http.health import STORE_IS_SILENT, Health, Metrics, disk_probe, store_probe
from ..http.server import RunningServer, serve_api
from ..settings.config import StorePlace
from ..settings.server import ServerConfig, TelemetryConfig
from ..store import Store, open_store
from ..store.demand import Demand
from ..store.reserve import RESERVE_BYTES
from ..telemetry.alarm_facts import AlarmFacts
from ..telemetry.process import LoopLag
from ..tools.watching import watched_loop
from ..trainers.live import Live
from .stopping import beside

if TYPE_CHECKING:
    from ..store.leadership import Leadership

_ROUTES: Final = "routes"

_DATABASE_SECONDS: Final = 60.0
"""How long a PostgreSQL may take to start that was started together with this server."""


@dataclass(eq=False, repr=False)
class BootstrapServer:
    store: Store
    health: Health
    lag: LoopLag
    app: BootstrapApp
    server: RunningServer
    leads: Leadership | None = None

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.live = Live()
        self.metrics.watch(self.lag, self.health)
        if self.leads is not None:
            self.metrics.add(partial(leads_metric, self.leads))

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return self.server.url

    async def open(self, api: ASGIApp) -> None:
        owner = None if self.leads is None else self.leads.owner
        await self.app.open(FromFollowers(api, owner))
        self.health.found(_ROUTES)
        if self.leads is not None:
            self.leads.answer()
        self.lag.begin_anew()

    def facts(self) -> dict[str, Any]:
        return {} if self.leads is None else {"leader": self.leads.facts()}

    def alarm_facts(self, demand: Demand, store: str) -> AlarmFacts:
        return AlarmFacts(
            broken={
                name: part.reason
                for name, part in self.health.parts.items()
                if part.state in ("down", "limited")
            },
            groups_wanted=demand.smallest_batch(),
            disk_free_bytes=_free_bytes(store),
        )

    async def close(self) -> None:
        """Answers waiting requests and takes no others; may be called twice."""
        self.app.close()
        await self.server.close()


@contextlib.asynccontextmanager
async def bootstrap_server(
    server: ServerConfig,
    telemetry: TelemetryConfig,
    store: StorePlace,
    expected: Sequence[str],
    *,
    shared: bool = False,
) -> AsyncIterator[BootstrapServer]:
    """Opens the store and starts the server. `expected`: parts other than the store that must be up
    before it is ready. `shared`: other servers share the store, so it opens the store only when it
    leads."""
    async with watched_loop(telemetry.slow_callback_seconds), LoopLag() as lag:
        health = Health(lag)
        for part in ("store", "disk", *expected, _ROUTES):  # before anybody can ask for them
            health.expect(part)
        start = _sharing if shared else _alone
        async with start(server, store, health, lag) as bootstrap:
            health.found("store", store_probe(bootstrap.store), silent=STORE_IS_SILENT)
            health.found("disk", disk_probe(bootstrap.store), failing="limited")
            try:
                async with beside("health", health.watch()):
                    yield bootstrap
            finally:
                await bootstrap.close()


@contextlib.asynccontextmanager
async def _alone(
    server: ServerConfig, store: StorePlace, health: Health, lag: LoopLag
) -> AsyncIterator[BootstrapServer]:
    opening = open_store(store, wait_seconds=_DATABASE_SECONDS, reserve_bytes=RESERVE_BYTES)
    async with opening as opened:
        app = BootstrapApp(health)
        running = await serve_api(app, server.host, server.port, server)
        yield BootstrapServer(opened, health, lag, app, running)


@contextlib.asynccontextmanager
async def _sharing(
    server: ServerConfig, store: StorePlace, health: Health, lag: LoopLag
) -> AsyncIterator[BootstrapServer]:
    from ..api.replicas import LeaderLink, follower_app
    from ..store.leadership import leadership

    _check_reachable(server)
    async with (
        leadership(store, server.takeover_seconds) as leads,
        LeaderLink(leads, server) as link,
    ):
        health.role = partial(role, leads)
        app = BootstrapApp(health, meanwhile=follower_app(leads, link, server, lag))
        running = await serve_api(app, server.host, server.port, server)
        leads.url = (server.advertise or running.url).rstrip("/")
        try:
            async with leads.lead() as opened:
                yield BootstrapServer(opened, health, lag, app, running, leads)
        finally:
            app.close()
            await running.close()


def _check_reachable(server: ServerConfig) -> None:
    if server.advertise is None and server.host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            "Servers that share a store must reach each other:"
            f" {server.host!r} is not an address of this one.",
            hint="Give --server.advertise http://THIS_MACHINE:PORT.",
        )


def _free_bytes(store: str) -> int | None:
    if "://" in store:
        return None
    try:
        disk = os.statvfs(Path(store).parent)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize
