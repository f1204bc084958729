"""The settings of `envserver check`."""

from __future__ import annotations

from pydantic import Field

from ...config import EnvironmentSettings, SandboxConfig
from ..command_line import CommandSpec

SUMMARY = """Checks an environment without any model: right results score what they should, empty,
absurd and cheating ones nothing; tasks are the same whenever they are listed, and show nothing that
is hidden. Exit status 0: all is as expected; 1: it is not; 2: the command line is wrong."""


class CheckSettings(EnvironmentSettings):
    """The settings that `check` has."""

    tasks: int = Field(default=50, ge=1)
    """How many tasks, from the first; all where there are fewer."""
    processes: int = Field(default=2, ge=1)
    """Results that are scored at a time, each in a process."""
    as_json: bool = False
    """Print the report as one JSON object."""
    sandbox: SandboxConfig = SandboxConfig()


COMMAND = CommandSpec("check", SUMMARY, CheckSettings, usage="--env NAME")
