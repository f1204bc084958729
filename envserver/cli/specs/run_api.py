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

SUMMARY = """Serves trainers, and environments that run elsewhere, over the Atropos wire and /v1.
Ctrl-C or SIGTERM stops it; accepted groups stay in the store."""


class RunApiSettings(Section):
    """Settings of `run-api`."""

    server: ServerConfig = ServerConfig()
    store: StorePlace = "data/envserver.db"
    """Where groups are stored: a file (SQLite) or a database URL."""
    log_level: LogLevel = "info"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""
    telemetry: TelemetryConfig = TelemetryConfig()
    retention: RetentionConfig = RetentionConfig()
    rollouts: DeliveryConfig = DeliveryConfig()


COMMAND = CommandSpec(
    "run-api",
    SUMMARY,
    RunApiSettings,
    frequent=(
        *("server.port", "server.host", "server.tokens_file", "store"),
        *("rollouts.max_staleness_at_delivery", "log_level", "log_format"),
    ),
)
