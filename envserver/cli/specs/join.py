"""The settings of `envserver join`."""

from __future__ import annotations

from ...running.run_settings import JoinSettings
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Runs rollouts of an environment on this machine for the server at URL (`serve` or
`run-api`). It reconnects automatically and continues with its own groups after a restart.
SIGTERM or Ctrl-C once finishes and delivers the open groups, then stops; twice stops at once,
a third time kills."""


COMMAND = CommandSpec(
    "join",
    SUMMARY,
    JoinSettings,
    usage="URL --env NAME",
    arguments=("url",),
    frequent=(*FREQUENT, "url", "token", "name", "weight"),
)
