"""`envserver sample NAME`: writes sample files of an environment's inputs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError, ConflictError
from envserver_records.files import storing

from ..registry import find
from .command_line import program
from .specs.sample_command import COMMAND


def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    environment = find(settings.environment)
    folder = settings.out or Path("samples") / environment.name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConflictError(f"{folder} exists.", hint="Name another folder: --out DIR.")
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        reading = environment.write_sample(folder)
    if not reading:
        folder.rmdir()
        raise ConfigError(f"The tasks of {environment.name!r} come from no file: it makes them.")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    command = f"{program()} process --env {settings.environment} {_flags(reading)} --model sim"
    sys.stdout.write("\n".join([*map(str, files), "Read by:", f"  {command}"]) + "\n")
    return 0


def _flags(reading: Mapping[str, Any]) -> str:
    """Returns the settings as flags; one with several values is repeated."""
    pairs = [
        (name, one)
        for name, value in reading.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    return " ".join(f"--env.{name} {shlex.quote(str(value))}" for name, value in pairs)
