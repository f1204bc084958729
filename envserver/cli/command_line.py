"""Declarations of commands: `COMMAND = CommandSpec(...)` shows help, and reads settings in
`run`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from envserver_records.errors import UsageError

from ..running.options import ANY_NAME, Option, options_of, sections_of, with_environment
from ..settings.config import EnvironmentSettings, Settings
from ..settings.section import EnvironmentConfig, Section
from .settings import export_dotenv, load_settings, named_environment, to_stderr
from .sources import ALIASES, Given, argument_name, path_of, read_flags

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


@dataclass(frozen=True)
class CommandSpec(Generic[C]):
    """Declares a command for help, settings and completion.

    Args:
        arguments: dotted paths of the settings that are given by position, in order; the last one
            takes all remaining arguments if it is a list.
        aliases: short flags -> dotted paths, in addition to `ALIASES`.
        frequent: dotted paths of the settings that `--help` shows; none: all of them.
        environment: the environment that the command always runs; None: the one of the sources.
        settings_for: returns the settings class with the fields that an environment adds beside
        `env`.
        openai_variables: whether OPENAI_API_KEY and its like name the engine where nothing else
            does; "openai": OpenAI itself is used if only a key is set.
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
        if self.environment is not None:
            return self.environment
        if "env" not in self.settings_class.model_fields:
            return None
        return named_environment(self.flags(argv))

    def options(self, argv: Sequence[str]) -> dict[str, Option]:
        return options_of(self._model(argv))

    def path_of(self, flag: str, options: Mapping[str, Option]) -> str:
        return path_of(flag.removeprefix("--"), options, {**ALIASES, **self.aliases})

    def shown_names(self) -> dict[str, str]:
        """Dotted path -> displayed name, if it is not `--path`: `--port`, `SOURCE`."""
        flags = {**ALIASES, **self.aliases}
        names = {path: f"--{name}" for name, path in flags.items() if len(name) > 1}
        names["environment"] = "--env"
        return names | {path: argument_name(path) for path in self.arguments}

    def _model(self, argv: Sequence[str]) -> type[C]:
        reference, model = self.named_environment(argv), self._settings_class(argv)
        return with_environment(model, reference) if reference else model

    def _settings_class(self, argv: Sequence[str]) -> type[C]:
        if self.settings_for is None or (reference := self.named_environment(argv)) is None:
            return self.settings_class
        from ..registry import find

        return self.settings_for(find(reference))

    def show_help(
        self, argv: Sequence[str], *, program: str = "envserver", with_environment: bool = True
    ) -> None:
        """`with_environment` False: `program` names the environment, so --env cannot be given."""
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
        reference = self.named_environment(words)
        names = self.shown_names()
        model = self._model(words)
        options = options_of(model)
        groups = dict(_groups(options, model, reference))
        sections = [title for title in groups if title.partition(":")[0].split(".")[0] == topic]
        bold, plain = ("\033[1m", "\033[0m") if _colors() else ("", "")
        usage = f"{program} {self.name} {usage}".rstrip()
        lines = [f"Usage: {usage} [--name value ...]", "", self.summary]
        if frequent and topic != "all" and not sections:
            lines += ["", f"{bold}Frequent settings{plain}"]
            own = groups.get(_only(reference), [])
            for option in [*(options[path] for path in frequent), *own]:
                lines += _short_lines(option, _name(option.path, names), bold, plain)
            lines += ["", *_more(options, groups)]
        else:
            for title in sections or groups:
                lines += ["", f"{bold}{title}{plain}"]
                for option in groups[title]:
                    lines += _lines(option, _name(option.path, names), bold, plain)
            lines += ["", _SOURCES]
        print("\n".join(lines))


def read_run_spec(
    command: CommandSpec[S],
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    environment: str | None = None,
) -> RunSpec[S]:
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
    found = shutil.which(Path(path).name)
    known = found is not None and Path(found).absolute() == Path(path).absolute()
    return quote(Path(path).name if known else path)


_INDENT = "      "
_COLUMN = 34
_MAX_DEFAULT = 60
_SOURCES = """\
A setting can be given in a YAML file (--config run.yaml), in `.env` or as an environment variable
(ENVSERVER_ENV__GROUP_SIZE=8), or as a flag (--env.group_size 8); later sources win."""


def help_topic(command_line: Sequence[str]) -> str | None:
    """ "" for the frequent settings, "all", or a section; None: no help."""
    for at, word in enumerate(command_line):
        if word in ("-h", "--help"):
            following = command_line[at + 1] if at + 1 < len(command_line) else ""
            return "" if following.startswith("-") else following
    return None


def _only(reference: str | None) -> str:
    return f"env: settings of {reference} only"


def _more(options: Mapping[str, Option], groups: Mapping[str, list[Option]]) -> list[str]:
    names = [title.partition(":")[0].split(".")[0] for title in groups]
    sections = ", ".join(dict.fromkeys(name for name in names if name != "General"))
    text = f"All {len(options)} settings: --help all. One section: --help SECTION ({sections})."
    return [*textwrap.wrap(text, 100), _SOURCES]


def _name(path: str, names: Mapping[str, str]) -> str:
    return names.get(path) or f"--{path.replace(ANY_NAME, 'NAME')}"


def _groups(
    options: Mapping[str, Option], model: type[Section], reference: str | None
) -> Iterator[tuple[str, list[Option]]]:
    sections = sections_of(model)
    own = [
        option
        for path, option in options.items()
        if path.startswith("env.") and path.split(".")[1] not in EnvironmentConfig.model_fields
    ]
    # sorted is stable: the top level first, then the sections in their order.
    for group in sorted(dict.fromkeys(o.group for o in options.values()), key=bool):
        if group.startswith("env.") and not group.endswith(f".{ANY_NAME}"):
            continue
        members = [o for o in options.values() if o.group == group and o not in own]
        members.sort(key=lambda o: o.path.startswith("log_"))  # of a base class, but of least use
        if group == "env":
            if own:
                yield _only(reference), own
            yield "env: settings of every environment", members
        else:
            title = group.replace(ANY_NAME, "NAME")
            yield f"{title}: {sections[group]}" if group else "General", members


def _short_lines(option: Option, name: str, bold: str, plain: str) -> list[str]:
    shows_default = option.default_text not in ("unset", "needed") and (
        len(option.default_text) <= _MAX_DEFAULT
    )
    default = f" [{option.default_text}]" if shows_default else ""
    width = _width(110) - _COLUMN
    text = textwrap.wrap(f"{option.first_sentence}{default}".strip(), width)
    shown = f"  {bold}{name}{plain}"
    if len(name) + 3 > _COLUMN:
        return [shown, *(" " * _COLUMN + line for line in text)]
    head = shown + " " * (_COLUMN - 2 - len(name)) + (text[0] if text else "")
    return [head.rstrip(), *(" " * _COLUMN + line for line in text[1:])]


def _lines(option: Option, name: str, bold: str, plain: str) -> list[str]:
    width = _width(100) - len(_INDENT)
    text = textwrap.wrap(" ".join(option.description.split()), width, break_on_hyphens=False)
    if option.is_switch and name.startswith("--"):
        name = f"--[no-]{name[2:]}"
        kind = ""
    else:
        kind = f" {option.type_name}"
    return [
        f"  {bold}{name}{plain}{kind} [{option.default_text}]",
        *(_INDENT + line for line in text),
    ]


def _colors() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _width(most: int) -> int:
    """The columns to fill; in a narrower terminal than two columns need, that breaks the lines."""
    return min(most, max(shutil.get_terminal_size((100, 24)).columns, _COLUMN + 20))
