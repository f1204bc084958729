"""The settings of `envserver join`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from ...config import Settings
from ...remote.messages import NAME_PATTERN
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Runs rollouts of an environment here for the server at URL (`serve` or `run-api`).
It reconnects by itself, and goes on with its own groups when it is started again. SIGTERM or
Ctrl-C once finishes and delivers the open groups and stops; twice stops at once."""


class JoinSettings(Settings):
    """Settings with those that only `join` has."""

    url: str = ""
    """Of the server, also as the first word: http://host:8000."""
    token: SecretStr = SecretStr("")
    """Access token of the server, of the role `environment`."""
    ca_certs: Path | None = None
    """Authorities (PEM) of the server's certificate, for https; unset: those of this machine."""
    certfile: Path | None = None
    """Certificate of this joiner and its key (PEM), where the server asks for one."""
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Of this joiner, unique at the server; unset: environment@host, with -2, -3, ... for others in
    the same folder."""
    joined_folder: Path = Path("data/joined")
    """Where the joiners of this machine keep who they are, to go on after a restart."""
    weight: float = Field(default=1.0, gt=0)
    """Its part of the groups, in proportion to the weights of the server's other environments."""
    minimum_share: float = Field(default=0.0, ge=0, le=1)
    """The least part of all groups that it has, whatever the weights say."""

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
