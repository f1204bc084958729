"""`envserver run-api`: the trainer API over a store, without an environment of its own.

Environments that others run register over the Atropos wire and post their groups; trainers lease or
fetch them. It is `serve` without the rollouts, over the same store.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from ..api.app import create_api
from ..api.doorway import Doorway
from ..api.health import Health, store_probe
from ..api.metrics import Metrics
from ..api.server import serve_api
from ..config import (
    LogFormat,
    LogLevel,
    RetentionConfig,
    Section,
    ServerConfig,
    StorePlace,
    TelemetryConfig,
)
from ..proxy.gate import Gate
from ..store import open_store
from ..telemetry.lag import LoopLag
from .help import show_help
from .logs import configure_logs
from .loop import run_loop
from .metrics import Deliveries
from .settings import load_settings

SUMMARY = """Serves trainers, and environments that others run, over the Atropos wire and /v1.
Ctrl-C or SIGTERM ends it; what was accepted stays in the store."""

ALIASES = {"host": "server.host", "port": "server.port"}


class RunApiSettings(Section):
    """The settings that `run-api` has."""

    server: ServerConfig = ServerConfig()
    store: StorePlace = "data/envserver.db"
    """Where groups are kept: a file (SQLite) or a database URL."""
    log_level: LogLevel = "info"
    """Least serious event that is logged."""
    log_format: LogFormat = "auto"
    """How a log line looks; auto: console on a terminal, else json."""
    telemetry: TelemetryConfig = TelemetryConfig()
    retention: RetentionConfig = RetentionConfig()


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        ConfigError: a setting is wrong, or the port cannot be had.
        StoreError: the store cannot be opened.
    """
    usage = "envserver run-api"
    if show_help(
        argv, usage=usage, summary=SUMMARY, settings_class=RunApiSettings, aliases=ALIASES
    ):
        return 0
    settings = load_settings(argv, settings_class=RunApiSettings, aliases=ALIASES)
    configure_logs(settings.log_level, settings.log_format)
    return run_loop(run_api(settings))


async def run_api(settings: RunApiSettings) -> int:
    """Serves until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    version = -1

    def publish(published: int) -> None:
        nonlocal version
        version = published

    async with (
        LoopLag(settings.telemetry.slow_callback_seconds) as lag,
        open_store(settings.store) as store,
    ):
        health, metrics = Health(lag), Metrics()
        health.found("store", store_probe(store))
        metrics.watch(lag, health)
        metrics.add(Deliveries(store, lambda: version).families)
        doorway = Doorway(health)
        await doorway.open(
            create_api(
                store,
                settings=settings.server,
                on_policy_version=publish,
                gate=Gate(),  # of no engine here: environments on other machines pause with it
                metrics=metrics,
                health=health,
                retention=settings.retention,
            )
        )
        server = await serve_api(
            doorway, settings.server.host, settings.server.port, settings.server
        )
        watching = asyncio.create_task(health.watch(), name="health")
        try:
            print(f"Trainers and environments: {server.url}", file=sys.stderr, flush=True)
            await stop.wait()
        finally:
            watching.cancel()
            health.drain()
            doorway.close()
            await server.close()
    return 0
