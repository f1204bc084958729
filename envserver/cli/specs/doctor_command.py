"""The settings of `envserver doctor`."""

from __future__ import annotations

from ...config import LogFormat, LogLevel, SandboxConfig, Section
from ..command_line import CommandSpec

SUMMARY = """Shows what this machine can do: Python, git, memory, and which sandbox backends
really contain model-written programs (small programs are run in each and try to escape). Exit
status 0: a sandbox works; 1: none works, and the output says how to fix it."""


class DoctorSettings(Section):
    """Settings of `doctor`."""

    sandbox: SandboxConfig = SandboxConfig()
    as_json: bool = False
    """Print everything, including each escape attempt, as one JSON object."""
    log_level: LogLevel = "error"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""


COMMAND = CommandSpec(
    "doctor",
    SUMMARY,
    DoctorSettings,
)
