"""`envserver init NAME`: makes the package of a new environment; see `scaffold`."""

from __future__ import annotations

import shlex
import sys

from .command_line import program
from .specs.init_command import COMMAND


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
