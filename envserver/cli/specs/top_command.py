"""The settings of `envserver top`."""

from __future__ import annotations

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec


class TopSettings(Section):
    """Settings of `top`."""

    url: str = "http://127.0.0.1:8000"
    """Address of the server; several equal servers: separate with commas. ENVSERVER_TOKEN holds the
    token, where it needs one."""
    seconds: float = Field(5.0, ge=0.5, le=3600)
    """Between two looks; the server renews its numbers every ten seconds."""
    once: bool = False
    """Show it once and end."""


COMMAND = CommandSpec(
    "top",
    "Shows what a running server does: rewards, speed, trainers, engines, failures.",
    TopSettings,
    usage="[URL]",
    arguments=("url",),
)
