"""The settings of `envserver view`."""

from __future__ import annotations

from pydantic import Field

from ...config import LogFormat, LogLevel, Section
from ..command_line import CommandSpec


class ViewSettings(Section):
    """Settings of `view`."""

    source: list[str] = Field(default_factory=list)
    """Files of `process` (.jsonl, .gz, .zst), unified trajectories or traces; folders of them or of
    `evaluate`; a store; or a server's URL (ENVSERVER_TOKEN holds its token). Several: compared."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the page; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Address to listen on, of this machine only; from elsewhere use an SSH tunnel."""
    open: bool = False
    """Open the page in the browser."""
    log_level: LogLevel = "warning"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""


COMMAND = CommandSpec(
    "view",
    "Shows groups and rollouts in the browser: files, folders, evaluations, a store or a server.",
    ViewSettings,
    usage="FILE | FOLDER | STORE | URL ...",
    arguments=("source",),
)
