"""Declarations of commands; a command first shows its help or reads its settings.

COMMAND = CommandSpec(
    "convert", "Makes ...", ConvertSettings, usage="SOURCE...", arguments=("sources",)
)

def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    ...
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from envserver_records.errors import UsageError

from ..config import EnvironmentSettings, Section, Settings
from ..running.options import Option, options_of, with_environment
from .flags import ALIASES, argument_name, path_of, read_flags
from .help import help_topic, show_help
from .openai_variables import export_dotenv
from .settings import load_settings, named_environment, to_stderr
from .sources import Given

if TYPE_CHECKING:
    from ..environment import Environment
    from ..running.mix import RunSpec

C = TypeVar("C", bound=Section)
S = TypeVar("S", bound=EnvironmentSettings)

ENGINE = (
    "model",
    "openai.base_url",
    "openai.model_name",
    "openai.api_key",
    "openai.server_type",
)
SAMPLING = ("sampling.temperature", "sampling.top_p", "sampling.max_tokens")
FREQUENT = (
    "environment",
    *ENGINE,
    "env.group_size",
    "env.total_steps",
    "env.max_token_length",
    "env.split",
    "env.seed",
    *SAMPLING,
    "rollouts.max_concurrent",
    "workers.processes",
    "log_level",
)
"""Settings that `--help` shows first in every command that makes rollouts."""


@dataclass(frozen=True)
class CommandSpec(Generic[C]):
    """Declares a command for help, settings and completion.

    Args:
        name: name as typed: `sft build`.
        summary: what it does, in a sentence or two.
        settings_class: its settings.
        usage: text after the name in the usage line.
        arguments: dotted paths of the settings that are given by position, in order; the last one
            takes all remaining arguments if it is a list.
        aliases: short flags -> dotted paths, in addition to `flags.ALIASES`.
        frequent: dotted paths of the settings that `--help` shows; none: all of them.
        environment: the environment that the command always runs; None: the one of the sources.
        settings_for: returns the settings class with the fields that an environment adds; None: it
            adds only its `env` section.
        openai_variables: whether OPENAI_API_KEY and its like name the engine where nothing else
            does: "openai" asks OpenAI itself if only a key is set.
    """

    name: str
    summary: str
    settings_class: type[C]
    usage: str = ""
    arguments: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    frequent: tuple[str, ...] = ()
    environment: str | None = None
    settings_for: Callable[[type[Environment]], type[C]] | None = None
    openai_variables: Literal["no", "engine", "openai"] = "no"

    def read(
        self,
        argv: Sequence[str],
        *,
        defaults: Mapping[str, Any] | None = None,
        environment: str | None = None,
        over_file: tuple[str, Mapping[str, Any]] = ("", {}),
        warn: Callable[[str], None] = to_stderr,
    ) -> C:
        """Reads the settings.

        Args:
            argv: the arguments after the command.
            defaults, environment, over_file, warn: as for `load_settings`.
        """
        export_dotenv(Path(), os.environ, warn)
        return load_settings(
            argv,
            settings_class=self._settings_class(argv),
            defaults=defaults,
            environment=environment or self.environment,
            aliases=self.aliases,
            arguments=self.arguments,
            over_file=over_file,
            openai_variables=self.openai_variables,
            warn=warn,
        )

    def flags(self, argv: Sequence[str]) -> list[Given]:
        """Reads the command line before the environment's settings are known."""
        options = options_of(Settings) | options_of(self.settings_class)
        return read_flags(argv, options, aliases=self.aliases, arguments=self.arguments)

    def named_environment(self, argv: Sequence[str]) -> str | None:
        """Returns the environment of the command or given in the sources, if any."""
        if self.environment is not None:
            return self.environment
        if "env" not in self.settings_class.model_fields:
            return None
        return named_environment(self.flags(argv))

    def options(self, argv: Sequence[str]) -> dict[str, Option]:
        """Returns all settings, including those of the environment given in the sources."""
        reference = self.named_environment(argv)
        model = self._settings_class(argv)
        return options_of(with_environment(model, reference) if reference else model)

    def path_of(self, flag: str, options: Mapping[str, Option]) -> str:
        """Returns the dotted path of `flag`."""
        return path_of(flag.removeprefix("--"), options, {**ALIASES, **self.aliases})

    def shown_names(self) -> dict[str, str]:
        """Returns dotted path -> displayed name, if it is not `--path`: `--port`, `SOURCE`."""
        flags = {**ALIASES, **self.aliases}
        names = {path: f"--{name}" for name, path in flags.items() if len(name) > 1}
        names["environment"] = "--env"
        return names | {path: argument_name(path) for path in self.arguments}

    def _settings_class(self, argv: Sequence[str]) -> type[C]:
        if self.settings_for is None or (reference := self.named_environment(argv)) is None:
            return self.settings_class
        from ..registry import find

        return self.settings_for(find(reference))

    def show_help(
        self, argv: Sequence[str], *, program: str = "envserver", with_environment: bool = True
    ) -> None:
        """Prints the help that `argv` asks for.

        Args:
            program: the text before the command in the usage line.
            with_environment: False: `program` names the environment, so --env cannot be given.
        """
        topic = help_topic(argv) or ""
        words = [word for word in argv if word not in ("--help", "-h", topic)]
        settings_class = self._settings_class(words)
        usage, frequent = self.usage, self.frequent
        added = settings_class.model_fields.keys() - self.settings_class.model_fields.keys()
        if frequent:
            frequent = (*(path for path in settings_class.model_fields if path in added), *frequent)
        if not with_environment:
            usage = re.sub(r"--env \S+ ?", "", usage)
            frequent = tuple(path for path in frequent if path != "environment")
        show_help(
            topic,
            usage=f"{program} {self.name} {usage}".rstrip(),
            summary=self.summary,
            settings_class=settings_class,
            reference=self.named_environment(words),
            names=self.shown_names(),
            frequent=frequent,
        )


def read_run_spec(
    command: CommandSpec[S],
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    environment: str | None = None,
) -> RunSpec[S]:
    """Reads the settings of a command that needs an environment.

    Args:
        defaults, environment: as for `load_settings`.
    """
    from ..registry import find
    from ..running.mix import RunSpec

    settings = command.read(argv, defaults=defaults, environment=environment)
    if settings.environment is None:
        raise UsageError(
            f"`envserver {command.name}` needs an environment: --env NAME or "
            "--env path/to/file.py.",
            hint="`envserver list` shows the names.",
        )
    return RunSpec(settings, settings.environment, find(settings.environment))


def program() -> str:
    """Returns the command that starts this program, as it can be typed again."""
    path = sys.argv[0]
    if Path(path).name == "__main__.py":
        return f"{_typed(sys.executable)} -m envserver"
    return _typed(path)


def _typed(path: str) -> str:
    """Returns the bare program name if the shell would find it, else its path."""
    found = shutil.which(Path(path).name)
    known = found is not None and Path(found).absolute() == Path(path).absolute()
    return quote(Path(path).name if known else path)
