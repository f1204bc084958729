"""The settings of `envserver check`."""

from __future__ import annotations

from pydantic import Field

from ..config import EnvironmentSettings, SandboxConfig, WorkersConfig
from ..judge_config import JudgeConfig


class CheckSettings(EnvironmentSettings):
    """Settings of `check`."""

    tasks: int = Field(default=50, ge=1)
    """Number of tasks to check, from the first; all if there are fewer."""
    plays: int = Field(default=10, ge=0)
    """Number of tasks to play wrongly, in each way; 0: play nothing, not even demonstrations."""
    processes: int = Field(default=2, ge=1)
    """Number of results scored in parallel, each in its own process."""
    as_json: bool = False
    """Print the report as one JSON object."""
    card: bool = False
    """Print the score card in Markdown, for the README of the environment."""
    sandbox: SandboxConfig = SandboxConfig()
    workers: WorkersConfig = WorkersConfig()
    judge: JudgeConfig = JudgeConfig()
