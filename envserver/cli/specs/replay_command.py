"""The settings of `envserver replay`."""

from __future__ import annotations

from ...running.run_settings import ReplaySettings
from ..command_line import CommandSpec

SUMMARY = """Runs one recorded rollout again, its calls answered with what they were answered then:
`envserver replay FILE --rollout ID`. It stops at the first difference in what the agent sends, and
says at the end whether result and score are the same (exit status 1: they are not). --debug runs
the agent in this process and stops it in pdb."""


COMMAND = CommandSpec(
    "replay", SUMMARY, ReplaySettings, usage="FILE --rollout ID", arguments=("source",)
)
