"""`envserver init`: the package of a new environment."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Literal

from envserver.cli.command_line import CommandSpec, program
from envserver.settings.section import Section

_SUMMARY = """Makes the package of a new environment, which works at once: the environment, a few
rows, a test, a README with its card, and pyproject.toml with the entry point. NAME is the folder
and the name of the environment, such as my-env."""


class InitSettings(Section):
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


COMMAND = CommandSpec("init", _SUMMARY, InitSettings, usage="NAME", arguments=("name",))


def run(argv: list[str]) -> int:
    from ..scaffold import KINDS, create

    settings = COMMAND.read(argv)
    written = create(settings.name, settings.kind, settings.out)
    folder = settings.out / settings.name
    lines = [
        f"{folder} is an environment: {KINDS[settings.kind].about}.",
        *(f"  {path}" for path in written),
        "Try next:",
        f"  pip install -e {shlex.quote(f'{folder}[test]')}",
        f"  {program()} check {settings.name}",
        f"  {program()} process --env {settings.name} --model sim",
        f"  pytest {folder}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
