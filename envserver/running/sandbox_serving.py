"""The work of `envserver sandboxes serve`: makes sandboxes for remote clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..api.sandboxes import create_sandbox_api
from ..http.health import Health, Metrics
from ..http.server import RunningServer, serve_api
from ..sandbox.machine import SandboxMachine
from ..sandbox.opening import sandboxes_at
from ..sandbox.service import SandboxService
from ..telemetry.process import LoopLag
from .run_settings import SandboxesServeSettings


@dataclass(eq=False, repr=False)
class ServedSandboxes:
    machine: SandboxMachine
    health: Health
    server: RunningServer

    @property
    def url(self) -> str:
        return self.server.url

    async def drain(self) -> None:
        self.health.drain()
        await self.machine.drain()

    async def close(self) -> None:
        await self.server.close(at_once=True)


@asynccontextmanager
async def sandbox_serving(settings: SandboxesServeSettings) -> AsyncIterator[ServedSandboxes]:
    config = settings.sandbox
    async with (
        LoopLag() as lag,
        SandboxService(config) as service,
        sandboxes_at(service.address) as maker,
    ):
        machine = SandboxMachine(
            maker,
            service.backend,
            sandboxes=config.concurrent,
            room=config.room or config.concurrent,
            most={
                "memory_mb": config.max_memory_mb,
                "disk_mb": config.max_disk_mb,
                "processes": config.max_processes,
                "wall_seconds": config.max_wall_seconds,
                "cpu_seconds": config.max_cpu_seconds,
            },
        )
        health, metrics = Health(lag), Metrics()
        health.found("sandboxes")
        metrics.watch(lag, health)
        app = create_sandbox_api(machine, settings.server, metrics, health)
        server = settings.server
        async with await serve_api(
            app, server.host, server.port, server, ping_seconds=_PING_SECONDS
        ) as running:
            yield ServedSandboxes(machine, health, running)


_PING_SECONDS = 20.0
"""A client that does not answer a ping for as long is gone, and its sandbox with it."""
