"""The settings of `envserver run-api`."""

from __future__ import annotations

from ...running.run_settings import RunApiSettings
from ..command_line import CommandSpec

SUMMARY = """Serves trainers, and environments that run elsewhere, over the Atropos wire and /v1.
Ctrl-C or SIGTERM stops it; accepted groups stay in the store."""


COMMAND = CommandSpec(
    "run-api",
    SUMMARY,
    RunApiSettings,
    frequent=(
        *("server.port", "server.host", "server.tokens_file", "store"),
        *("rollouts.max_staleness_at_delivery", "log_level", "log_format"),
    ),
)
