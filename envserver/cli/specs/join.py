"""The settings of `envserver join`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from ...config import Settings
from ...remote.messages import NAME_PATTERN
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Runs rollouts of an environment on this machine for the server at URL (`serve` or
`run-api`). It reconnects automatically and continues with its own groups after a restart.
SIGTERM or Ctrl-C once finishes and delivers the open groups, then stops; twice stops at once."""


class JoinSettings(Settings):
    """Settings of `join`."""

    url: str = ""
    """URL of the server: http://host:8000. Can be given as the first argument."""
    token: SecretStr = SecretStr("")
    """Access token for the server, with the role `environment`."""
    ca_certs: Path | None = None
    """CA certificates (PEM) that verify the server, for https; unset: those of this machine."""
    certfile: Path | None = None
    """Client certificate with its key (PEM), if the server asks for one."""
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name of this runner, unique on the server; unset: environment@host, with -2, -3, ... for
    others in the same folder."""
    joined_folder: Path = Path("data/joined")
    """Folder where the runners of this machine keep their identity, to continue after a restart."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the groups, relative to the weights of the server's other environments."""
    minimum_share: float = Field(default=0.0, ge=0, le=1)
    """Minimum share of all groups, whatever the weights."""

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("an address must look like http://host:8000")
        return value.rstrip("/")


COMMAND = CommandSpec(
    "join",
    SUMMARY,
    JoinSettings,
    usage="URL --env NAME",
    arguments=("url",),
    frequent=(*FREQUENT, "url", "token", "name", "weight"),
)
