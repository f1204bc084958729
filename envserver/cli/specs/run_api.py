"""The settings of `envserver run-api`."""

from __future__ import annotations

from ...config import (
    LogFormat,
    LogLevel,
    RetentionConfig,
    Section,
    ServerConfig,
    StorePlace,
    TelemetryConfig,
)
from ...delivery_config import DeliveryConfig
from ..command_line import CommandSpec

SUMMARY = """Serves trainers, and environments that others run, over the Atropos wire and /v1.
Ctrl-C or SIGTERM ends it; what was accepted stays in the store."""


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
    rollouts: DeliveryConfig = DeliveryConfig()


COMMAND = CommandSpec("run-api", SUMMARY, RunApiSettings)
