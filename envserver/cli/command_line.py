"""What a command does first: its help, or its checked settings and the environment they name.

class ProcessSettings(Settings):
    resume: bool = False
    \"\"\"Go on with a file that exists.\"\"\"

def run(argv: list[str]) -> int:
    line = read_command_line("process", "Makes ...", argv, settings_class=ProcessSettings)
    if line is None:
        return 0  # the help was shown
    ... line.settings.resume, line.environment_class, line.reference ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..config import EnvironmentSettings
from ..environment import Environment
from ..errors import UsageError
from ..registry import find
from .help import show_help
from .settings import load_settings

S = TypeVar("S", bound=EnvironmentSettings)


@dataclass(frozen=True)
class CommandLine(Generic[S]):
    """A command line that was read.

    Args:
        settings: checked; `settings.env` is the environment's own Config.
        reference: what was said after `--env`.
        environment_class: the environment that it names.
    """

    settings: S
    reference: str
    environment_class: type[Environment]


def read_command_line(
    command: str,
    summary: str,
    argv: Sequence[str],
    *,
    settings_class: type[S],
    defaults: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> CommandLine[S] | None:
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
    return CommandLine(settings, settings.environment, find(settings.environment))
