"""Declarations of commands: `COMMAND = CommandSpec(...)` shows help, and reads settings in
`run`."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from envserver_records.errors import UsageError

from ..running.options import (
    ANY_NAME,
    Option,
    expanded,
    flatten,
    options_of,
    validated,
    with_environment,
)
from ..settings.config import EnvironmentSettings, Settings
from ..settings.section import EnvironmentConfig, Section
from .settings import Sources, chosen_values, engine_variables, export_dotenv, to_stderr
from .sources import ALIASES, FlagReader, Given, argument_name

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
        environ: MutableMapping[str, str] | None = None,
        folder: Path = Path(),
    ) -> C:
        """Reads the settings from all sources.

        Sources, from lowest to highest precedence: defaults, `--config run.yaml`, `.env`,
        environment variables, flags. In the result `env` has the type of the environment's own
        `Config` and `environment` its reference. Settings that the command lacks are ignored in
        files and variables.

        Args:
            defaults: a tree of values that every source overrides.
            environment: the environment, which overrides the sources.
            over_file: a place in a file and its tree of values, which override the rest of the
                file.
            warn: called with one line for each name that is old, or has no effect.
        """
        environ = os.environ if environ is None else environ
        export_dotenv(folder, environ, warn)
        sources = self.sources(argv, environ, folder)
        settings_class = self._settings_class(argv)
        reference = environment = environment or self.environment
        if reference is None and "env" in settings_class.model_fields:
            reference = sources.environment(self._basic_options)
        model = _of_environment(settings_class, reference)
        options = options_of(model)
        place, tree = over_file
        flat = flatten(tree, options)
        over = [Given(path, value, place, "file") for path, value in flat.items()]
        named = [*sources.in_file(options), *over, *sources.variables, *sources.flags]
        options = expanded(options, [given.path.removeprefix("no_") for given in named])
        # Only now is it known which flags are switches.
        flags = [given for given in self._reader(options).read(argv) if given.path != "config"]
        if environment is not None:
            flags = [given for given in flags if given.path != "environment"]
            flags.append(Given("environment", environment, "--env", "flag"))
        from_file = sources.in_file(options_of(Settings) | options)
        given = [*from_file, *over, *sources.variables, *flags]
        if self.openai_variables != "no":
            alone = self.openai_variables == "openai"
            given = [*engine_variables(given, environ, folder, warn, alone=alone), *given]
        values, places = chosen_values(given, options, settings_class, warn)

        def where(path: str) -> str:
            name = argument_name(path) if path in self.arguments else f"--{path}"
            return places.get(path, name)

        return validated(model, values, options, where, defaults)

    def sources(
        self, argv: Sequence[str], environ: Mapping[str, str] = os.environ, folder: Path = Path()
    ) -> Sources:
        """Reads the sources before the environment's settings are known."""
        return Sources.of(self._reader(self._basic_options).read(argv), environ, folder)

    def named_environment(self, argv: Sequence[str]) -> str | None:
        if self.environment is not None:
            return self.environment
        if "env" not in self.settings_class.model_fields:
            return None
        return self.sources(argv).environment(self._basic_options)

    def options(self, argv: Sequence[str]) -> dict[str, Option]:
        return options_of(self._model(argv))

    def path_of(self, flag: str, options: Mapping[str, Option]) -> str:
        return self._reader(options).path_of(flag.removeprefix("--"))

    def shown_names(self) -> dict[str, str]:
        """Dotted path -> displayed name, if it is not `--path`: `--port`, `SOURCE`."""
        flags = {**ALIASES, **self.aliases}
        names = {path: f"--{name}" for name, path in flags.items() if len(name) > 1}
        names["environment"] = "--env"
        return names | {path: argument_name(path) for path in self.arguments}

    @property
    def _basic_options(self) -> dict[str, Option]:
        return options_of(Settings) | options_of(self.settings_class)

    def _reader(self, options: Mapping[str, Option]) -> FlagReader:
        return FlagReader(options, {**ALIASES, **self.aliases}, self.arguments)

    def _model(self, argv: Sequence[str]) -> type[C]:
        return _of_environment(self._settings_class(argv), self.named_environment(argv))

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
        usage, frequent = self.usage, self.frequent
        if frequent:
            fields = self._settings_class(words).model_fields
            added = [path for path in fields if path not in self.settings_class.model_fields]
            frequent = (*added, *frequent)
        if not with_environment:
            usage = re.sub(r"--env \S+ ?", "", usage)
            frequent = tuple(path for path in frequent if path != "environment")
        only = f"env: settings of {self.named_environment(words)} only"
        names = self.shown_names()
        options = self.options(words)
        groups = _groups(options, only)
        sections = [title for title in groups if title.partition(":")[0].split(".")[0] == topic]
        usage = f"{program} {self.name} {usage}".rstrip()
        lines = [f"Usage: {usage} [--name value ...]", "", self.summary]
        if frequent and topic != "all" and not sections:
            lines += ["", _bold("Frequent settings")]
            for option in [*(options[path] for path in frequent), *groups.get(only, [])]:
                lines += _short_lines(option, _name(option.path, names))
            lines += ["", *_more(options, groups), _SOURCES]
        else:
            for title in sections or groups:
                lines += ["", _bold(title)]
                for option in groups[title]:
                    lines += _lines(option, _name(option.path, names))
            lines += ["", _SOURCES]
        print("\n".join(lines))


def _of_environment(settings_class: type[C], reference: str | None) -> type[C]:
    if reference is None or "env" not in settings_class.model_fields:
        return settings_class
    from ..registry import find

    return with_environment(settings_class, find(reference).Config)


def read_run_spec(command: CommandSpec[S], argv: Sequence[str], **reading: Any) -> RunSpec[S]:
    from ..registry import find
    from ..running.mix import RunSpec

    settings = command.read(argv, **reading)
    if settings.environment is None:
        raise UsageError(
            f"`envserver {command.name}` needs an environment: --env NAME or "
            "--env path/to/file.py.",
            hint="`envserver list` shows the names.",
        )
    return RunSpec(settings, settings.environment, find(settings.environment))


def say(line: str) -> None:
    """Prints a line about the work, which is not its result."""
    print(line, file=sys.stderr, flush=True)


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


def _more(options: Mapping[str, Option], groups: Mapping[str, list[Option]]) -> list[str]:
    names = [title.partition(":")[0].split(".")[0] for title in groups]
    sections = ", ".join(dict.fromkeys(name for name in names if name != "General"))
    text = f"All {len(options)} settings: --help all. One section: --help SECTION ({sections})."
    return textwrap.wrap(text, 100)


def _name(path: str, names: Mapping[str, str]) -> str:
    return names.get(path) or f"--{path.replace(ANY_NAME, 'NAME')}"


def _groups(options: Mapping[str, Option], only: str) -> dict[str, list[Option]]:
    """Returns the options by the title of their section; `only`: the title of the environment's
    own."""
    groups: dict[str, list[Option]] = {"": []}
    own = []
    for path, option in options.items():
        if path.startswith("env.") and path.split(".")[1] not in EnvironmentConfig.model_fields:
            own.append(option)
        elif not option.group.startswith("env.") or option.group.endswith(f".{ANY_NAME}"):
            groups.setdefault(option.group, []).append(option)
    titled: dict[str, list[Option]] = {}
    for group, members in groups.items():
        if group == "env":
            titled |= {only: own} if own else {}
            titled["env: settings of every environment"] = members
        elif members:
            about = inspect.cleandoc(members[0].model.__doc__ or "").partition("\n")[0]
            titled[f"{group.replace(ANY_NAME, 'NAME')}: {about}" if group else "General"] = members
    # Those of a base class, but of least use.
    titled.get("General", []).sort(key=lambda option: option.path.startswith("log_"))
    return titled


def _short_lines(option: Option, name: str) -> list[str]:
    shows_default = option.default_text not in ("unset", "needed") and (
        len(option.default_text) <= _MAX_DEFAULT
    )
    default = f" [{option.default_text}]" if shows_default else ""
    width = _width(110) - _COLUMN
    text = textwrap.wrap(f"{option.first_sentence}{default}".strip(), width)
    shown = f"  {_bold(name)}"
    if len(name) + 3 > _COLUMN:
        return [shown, *(" " * _COLUMN + line for line in text)]
    head = shown + " " * (_COLUMN - 2 - len(name)) + (text[0] if text else "")
    return [head.rstrip(), *(" " * _COLUMN + line for line in text[1:])]


def _lines(option: Option, name: str) -> list[str]:
    width = _width(100) - len(_INDENT)
    text = textwrap.wrap(" ".join(option.description.split()), width, break_on_hyphens=False)
    kind = f" {option.type_name}"
    if option.is_switch and name.startswith("--"):
        name, kind = f"--[no-]{name[2:]}", ""
    head = f"  {_bold(name)}{kind} [{option.default_text}]"
    return [head, *(_INDENT + line for line in text)]


def _bold(text: str) -> str:
    has_colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\033[1m{text}\033[0m" if has_colors else text


def _width(most: int) -> int:
    """The columns to fill; in a narrower terminal than two columns need, that breaks the lines."""
    return min(most, max(shutil.get_terminal_size((100, 24)).columns, _COLUMN + 20))
