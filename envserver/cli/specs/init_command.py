"""The settings of `envserver init`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Makes the package of a new environment, which works at once: the environment, a few
rows, a test, a README with its card, and pyproject.toml with the entry point. NAME is the folder
and the name of the environment, such as my-env."""


class InitSettings(Section):
    """Settings of `init`."""

    name: str
    """Name of the environment: lower-case letters, digits and dashes. Can be given as the first
    argument."""
    kind: Literal["single", "tools", "multi-agent", "sandbox", "judge", "game", "smolagents"] = (
        "single"
    )
    """Kind of environment to begin with: one answer, tools, several agents, programs in a sandbox,
    a judge, a game against the server, an agent of smolagents."""
    out: Path = Path()
    """Folder in which the folder NAME is made."""


COMMAND = CommandSpec("init", SUMMARY, InitSettings, usage="NAME", arguments=("name",))
