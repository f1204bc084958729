"""Reads flags, variables and files into validated settings.

Sources, from lowest to highest precedence: defaults, `--config run.yaml`, `.env`, environment
variables, flags. In the result `env` has the type of the environment's own `Config` and
`environment` its reference. All mistakes are reported in one ConfigError, one line each, with the
flag, variable or file:line and the nearest valid name. It never contains the values of secrets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from envserver_records.errors import ConfigError
from pydantic import BaseModel

from ..config import Section, Settings
from ..environment_config import EnvironmentConfig
from ..running.options import (
    ANY_NAME,
    Option,
    expanded,
    flatten,
    named_sections,
    nearest,
    options_of,
    parse,
    preset,
    sampling_of_model,
    validated,
    with_environment,
)
from .atropos_names import EQUIVALENTS, IGNORED, REFUSED
from .flags import argument_name, read_flags
from .openai_variables import engine_variables
from .renamed import current_path, with_old_names
from .sources import (
    VARIABLE_PREFIX,
    ConfigFile,
    Given,
    config_file,
    read_dotenv,
    read_variables,
)

S = TypeVar("S", bound=Section)


def to_stderr(line: str) -> None:
    """Prints a warning to stderr."""
    print(f"envserver: {line}", file=sys.stderr)


def once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Returns `tell` without repetitions of earlier lines."""
    told: set[str] = set()

    def tell_new(line: str) -> None:
        if line not in told:
            told.add(line)
            tell(line)

    return tell_new


def load_settings(
    command_line: Sequence[str],
    *,
    settings_class: type[S] = Settings,  # type: ignore[assignment]
    config_class: type[EnvironmentConfig] | None = None,
    environment: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    warn: Callable[[str], None] = to_stderr,
    over_file: tuple[str, Mapping[str, Any]] = ("", {}),
    openai_variables: Literal["no", "engine", "openai"] = "no",
) -> S:
    """Reads the settings of one command from all sources.

    Args:
        command_line: the arguments after the command.
        settings_class: `Settings`, or a subclass with the command's own flags as further fields, or
            any Section with fewer of them (then other settings in files and variables are ignored).
        config_class: the environment's Config; unset: the Config of the given environment.
        environment: the environment, which overrides the sources.
        defaults: a tree of values that every source overrides.
        aliases: short flags -> dotted paths, such as `{"port": "engine.port"}`.
        arguments: dotted paths of the settings that are given by position.
        environ: environment variables; unset: those of this process.
        folder: folder of `.env`; unset: the working directory.
        over_file: a place in a file and its tree of values, which override the rest of the file.
        openai_variables: whether OPENAI_API_KEY and its like name the engine where nothing else
            does; "openai": OpenAI itself is asked if only a key is set.
        warn: called with one line for each name that is old, or has no effect.
    """
    read = partial(read_flags, aliases=aliases, arguments=arguments)
    flags, file, variables = _sources(
        read(command_line, _basic_options(settings_class)), environ, folder or Path()
    )
    model = settings_class
    if "env" in settings_class.model_fields:
        basic = _basic_options(settings_class)
        reference = environment or _environment([*file.read(basic), *variables, *flags])
        if config_class is not None or reference is not None:
            model = with_environment(settings_class, reference or "", config_class)
    options = options_of(model)
    origin, tree = over_file
    over = [
        Given(path, value, origin, "file", is_text=False)
        for path, value in flatten(tree, options).items()
    ]
    names = [given.path.removeprefix("no_") for given in (*over, *variables, *flags)]
    names += [name for section in named_sections(options) for name in file.names_in(section)]
    options = expanded(options, names)
    flags = [given for given in read(command_line, options) if given.path != "config"]
    if environment is not None:
        flags = [given for given in flags if given.path != "environment"]
        flags.append(Given("environment", environment, "--env", "flag"))
    from_file = file.read(with_old_names(options_of(Settings) | options))

    problems = _Problems()
    given = [*from_file, *over, *variables, *flags]
    if openai_variables != "no":
        environ = os.environ if environ is None else environ
        alone = openai_variables == "openai"
        given = [*engine_variables(given, environ, folder or Path(), warn, alone=alone), *given]
    chosen = _choose(given, options, settings_class, warn, problems)
    values = preset(model) | flatten(defaults or {}, options)
    said = _parsed(chosen, options, problems)
    problems.raise_if_any()
    values |= sampling_of_model(model, values | said, options) | said

    def where(path: str) -> str:
        if path in chosen:
            return chosen[path][-1].where
        return argument_name(path) if path in arguments else f"--{path}"

    return validated(model, values, options, where)


def named_environment(flags: Sequence[Given]) -> str | None:
    """Returns the environment given in the sources, without checking anything else.

    Args:
        flags: the command line, as `read_flags` reads it.
    """
    flags, file, variables = _sources(flags, None, Path())
    return _environment([*file.read(options_of(Settings)), *variables, *flags])


def _basic_options(settings_class: type[BaseModel]) -> dict[str, Option]:
    """Returns the settings that are known before the environment is."""
    return options_of(Settings) | options_of(settings_class)


class _Problems:
    """Collects mistakes so that all are reported at once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        if line not in self._lines:
            self._lines.append(line)

    def raise_if_any(self) -> None:
        if self._lines:
            raise ConfigError("\n".join(self._lines), problems=self._lines)


def _sources(
    flags: Sequence[Given], environ: Mapping[str, str] | None, folder: Path
) -> tuple[list[Given], ConfigFile, list[Given]]:
    """Returns flags (without --config), the file given by --config, and variables."""
    named = [given for given in flags if given.path == "config"]
    if len(named) > 1:
        raise ConfigError("--config is given twice.", hint="Put everything into one file.")
    if named and not named[0].value:
        raise ConfigError("--config needs a value: the path of a YAML file.")
    file = config_file(Path(named[0].value) if named else None)
    variables = read_dotenv(folder / ".env")
    variables += read_variables(os.environ if environ is None else environ)
    return [given for given in flags if given.path != "config"], file, variables


def _environment(given: Iterable[Given]) -> str | None:
    named = [one for one in given if one.path == "environment"]
    flags = [one for one in named if one.kind == "flag"]
    if len(flags) > 1:
        values = " and ".join(str(one.value) for one in flags)
        raise ConfigError(
            f"--env is given twice ({values}).", hint="For several, use --env math=2,code=1."
        )
    if not named:
        return None
    last = named[-1]
    if not isinstance(last.value, str) or not last.value:
        raise ConfigError(
            f"{last.where} needs a value: the name of an environment or a .py file.",
            hint="`envserver list` shows the names.",
        )
    return last.value


def _choose(
    all_given: Iterable[Given],
    options: Mapping[str, Option],
    settings_class: type[BaseModel],
    warn: Callable[[str], None],
    problems: _Problems,
) -> dict[str, list[Given]]:
    """Returns the values of each option from its strongest source; several only if a flag is
    repeated."""
    elsewhere = options_of(Settings)
    chosen: dict[str, list[Given]] = {}
    for given in all_given:
        path = current_path(given.path, options)
        if path != given.path:
            warn(f"{given.where} is now {_spelled(path, given)}.")
        elif path not in options:
            path = EQUIVALENTS.get(path, current_path(path, elsewhere))
        if path in options:
            before = chosen.get(path, [])
            repeated = given.kind == "flag" and bool(before) and before[0].kind == "flag"
            chosen[path] = [*before, given] if repeated else [given]
        elif path in REFUSED:
            if str(given.value).lower() not in ("false", "0", "no", "off"):
                problems.add(f"{given.where} is not supported. {REFUSED[path]}")
        elif path in IGNORED:
            warn(f"{given.where} has no effect here: {IGNORED[path]}.")
        elif given.kind == "flag" or not _is_for_another(path, settings_class):
            problems.add(_unknown(given, path, options, elsewhere))
    return chosen


def _is_for_another(path: str, settings_class: type[BaseModel]) -> bool:
    """Returns whether a path in a shared file or variable is another command's setting."""
    from ..running.run_settings import JoinSettings  # only for a name that this command lacks

    if path.startswith("env.") and "env" not in settings_class.model_fields:
        return True
    return path in options_of(JoinSettings)


def _unknown(
    given: Given, path: str, options: Mapping[str, Option], elsewhere: Mapping[str, Option]
) -> str:
    members = [known for known in options if known.startswith(f"{path}.")]
    if members:
        return f"{given.where} is a group of settings: try {_spelled(members[0], given)}."
    if path in elsewhere:
        return f"{given.where} has no meaning for this command."
    sections = {known.rpartition(".")[0] for known in options} if given.kind == "file" else set()
    near = nearest(path, [*options, *sorted(sections - {""})])
    tail = f" Did you mean {_spelled(near, given)}?" if near else " See --help all."
    return f"{given.where}: there is no such setting.{tail}"


def _spelled(path: str, like: Given) -> str:
    """Returns `path` in the notation of the source that `like` comes from."""
    path = path.replace(f".{ANY_NAME}", ".NAME")
    if like.kind == "flag":
        return f"--{'env' if path == 'environment' else path}"
    if like.kind == "variable":
        return VARIABLE_PREFIX + path.replace(".", "__").upper()
    return path


def _parsed(
    chosen: Mapping[str, list[Given]], options: Mapping[str, Option], problems: _Problems
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, given in chosen.items():
        option = options[path]
        try:
            parsed = [_parsed_one(one, option) for one in given]
        except ValueError as error:
            problems.add(f"{given[-1].where}: {error}.")
            continue
        if option.is_list and len(parsed) > 1:
            values[path] = [item for one in parsed for item in _as_list(one)]
        else:
            values[path] = parsed[-1]
    return values


def _parsed_one(given: Given, option: Option) -> Any:
    if not given.is_text:
        return given.value
    if given.value is None:
        if option.is_bool:
            return True
        raise ValueError(f"a value is needed ({option.type_name})")
    return parse(option, given.value)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
