"""The settings of `envserver serve`."""

from __future__ import annotations

from ...config import MixSettings
from ...running.run_settings import ServeSettings
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Runs rollouts of one or more environments and serves the groups to trainers. SIGTERM
or Ctrl-C once finishes the open groups and stops; twice stops at once, a
third time kills."""


COMMAND: CommandSpec[MixSettings] = CommandSpec(
    "serve",
    SUMMARY,
    ServeSettings,
    usage="--env NAME[=WEIGHT,NAME=WEIGHT]",
    frequent=(
        *FREQUENT,
        "server.port",
        "server.host",
        "server.tokens_file",
        "store",
        "rollouts.max_staleness",
        "verbose",
        "ray.address",
        "ray.runners",
    ),
    aliases={"ray": "ray.address"},
    openai_variables="engine",
)
