"""The settings of `envserver agents install` and `agents list`."""

from __future__ import annotations

from pathlib import Path

from ...config import Section
from ..command_line import CommandSpec


class InstallSettings(Section):
    """Settings of `agents install`."""

    names: list[str]
    """Names of agents, as `agents list` shows them."""
    version: str = ""
    """Version of a single agent; unset: the one that is tested with this envserver."""
    folder: Path | None = None
    """Folder of all installed agents; unset: $XDG_DATA_HOME/envserver/agents. Give the same one to
    runs, as --agent.folder."""


class ListSettings(Section):
    """Settings of `agents list`."""

    folder: Path | None = None
    """Folder of all installed agents; unset: $XDG_DATA_HOME/envserver/agents."""


INSTALL = CommandSpec(
    "agents install",
    "Installs coding agents from npm and PyPI, each in a folder of its own, for --agent NAME.",
    InstallSettings,
    usage="NAME...",
    arguments=("names",),
)
LIST = CommandSpec("agents list", "Lists the agents that --agent can name.", ListSettings)
