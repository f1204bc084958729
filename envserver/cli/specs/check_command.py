"""The settings of `envserver check`."""

from __future__ import annotations

from pydantic import Field

from ...config import EnvironmentSettings, SandboxConfig
from ...judge_config import JudgeConfig
from ..command_line import CommandSpec

SUMMARY = """Checks an environment without a model: correct results get the expected score;
empty, absurd and cheating results get nothing; tasks are the same each time they are listed and
do not show hidden fields. Exit status 0: all checks pass; 1: a check fails; 2: the command line
is wrong."""


class CheckSettings(EnvironmentSettings):
    """Settings of `check`."""

    tasks: int = Field(default=50, ge=1)
    """Number of tasks to check, from the first; all if there are fewer."""
    processes: int = Field(default=2, ge=1)
    """Number of results scored in parallel, each in its own process."""
    as_json: bool = False
    """Print the report as one JSON object."""
    sandbox: SandboxConfig = SandboxConfig()
    judge: JudgeConfig = JudgeConfig()


COMMAND = CommandSpec(
    "check",
    SUMMARY,
    CheckSettings,
    usage="--env NAME",
    frequent=(
        *("environment", "env.split", "env.seed", "tasks", "processes", "as_json"),
        *("sandbox.backend", "log_level"),
    ),
)
