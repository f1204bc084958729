"""What a command does first: its help, or its checked settings and the environment they name.

class ProcessSettings(Settings):
    resume: bool = False
    \"\"\"Go on with a file that exists.\"\"\"

def run(argv: list[str]) -> int:
    line = read_command_line("process", "Makes ...", argv, settings_class=ProcessSettings)
    if line is None:
        return 0  # the help was shown
    ... line.settings.resume, line.make_environment(), line.reference ...
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from envserver_records.errors import UsageError

from ..config import EnvironmentSettings
from ..registry import find
from ..running.spec import RunSpec
from .help import show_help
from .settings import load_settings

S = TypeVar("S", bound=EnvironmentSettings)


def program() -> str:
    """How this program was called, as it can be typed again."""
    path = sys.argv[0]
    if Path(path).name == "__main__.py":
        return f"{_typed(sys.executable)} -m envserver"
    return _typed(path)


def _typed(path: str) -> str:
    """The bare name of a program that the shell would find under it, else its path."""
    found = shutil.which(Path(path).name)
    known = found is not None and Path(found).absolute() == Path(path).absolute()
    return quote(Path(path).name if known else path)


def read_command_line(
    command: str,
    summary: str,
    argv: Sequence[str],
    *,
    settings_class: type[S],
    defaults: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> RunSpec[S] | None:
    """The settings of a command that needs an environment; None when its help was asked and shown.

    Args:
        command: its name, as it is typed.
        summary: what it does, in a sentence or two.
        argv: the words after the command.
        settings_class: `EnvironmentSettings` or `Settings`, with the command's own flags as further
            fields.
        defaults, aliases: as for `load_settings`.

    Raises:
        UsageError: no environment is named.
        ConfigError, NotFoundError: as for `load_settings`.
    """
    usage = f"envserver {command} --env NAME"
    if show_help(
        argv, usage=usage, summary=summary, settings_class=settings_class, aliases=aliases
    ):
        return None
    settings = load_settings(
        argv, settings_class=settings_class, defaults=defaults, aliases=aliases
    )
    if settings.environment is None:
        raise UsageError(
            f"`envserver {command}` needs an environment: --env NAME or --env path/to/file.py.",
            hint="`envserver list` shows the names.",
        )
    return RunSpec(settings, settings.environment, find(settings.environment))
