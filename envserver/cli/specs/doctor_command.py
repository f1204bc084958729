"""The settings of `envserver doctor`."""

from __future__ import annotations

from ...config import LogLevel, SandboxConfig, Section
from ..command_line import CommandSpec

SUMMARY = """Shows what this machine can do: Python, git, memory, and which backends really hold
programs that a model wrote (small ones are run behind each, and try to get out). Exit status 0:
there are sandboxes; 1: none can be made, and what to do about it is said."""


class DoctorSettings(Section):
    """The settings that `doctor` has."""

    sandbox: SandboxConfig = SandboxConfig()
    as_json: bool = False
    """Print everything, each attempt included, as one JSON object."""
    log_level: LogLevel = "error"
    """Least serious event that is logged."""


COMMAND = CommandSpec(
    "doctor",
    SUMMARY,
    DoctorSettings,
)
