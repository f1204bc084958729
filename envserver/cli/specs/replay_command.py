"""The settings of `envserver replay`."""

from __future__ import annotations

from ...running.run_settings import ReplaySettings
from ..command_line import CommandSpec

SUMMARY = """Runs one recorded rollout again and answers its calls with the recorded answers:
`envserver replay FILE --rollout ID`. It stops at the first difference in what the agent sends,
and reports at the end whether result and score are the same (exit status 1: they are not).
--debug runs the agent in this process and stops it in pdb."""


COMMAND = CommandSpec(
    "replay",
    SUMMARY,
    ReplaySettings,
    usage="FILE --rollout ID",
    arguments=("source",),
    frequent=(
        "source",
        "rollout",
        "environment",
        "services",
        "debug",
        "without_walls",
        "log_level",
    ),
)
