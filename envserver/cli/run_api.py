"""`envserver run-api`: the trainer API over a store, without an environment of its own.

Environments that others run register over the Atropos wire and post their groups; trainers lease or
fetch them. It is `serve` without the rollouts, over the same store.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from ..api.app import create_api
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
from .front import front
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

    async with front(settings.server, settings.telemetry, settings.store, ()) as door:
        door.metrics.add(Deliveries(door.store, lambda: version).families)
        api = create_api(
            door.store,
            settings=settings.server,
            on_policy_version=publish,
            gate=Gate(),  # of no engine here: environments on other machines pause with it
            metrics=door.metrics,
            health=door.health,
            retention=settings.retention,
        )
        await door.open(api)
        print(f"Trainers and environments: {door.url}", file=sys.stderr, flush=True)
        await stop.wait()
        door.health.drain()
    return 0
