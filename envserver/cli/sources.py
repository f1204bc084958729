"""Sources of settings besides the command line: environment variables, `.env`, a YAML file.

Each reader returns `Given`s: a dotted path, a value and its origin (`--env.seed`, `run.yaml:12`).
Text of flags and variables is parsed later, when the type is known; only the form of the source is
checked here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError

VARIABLE_PREFIX = "ENVSERVER_"
_OF_TESTS = "ENVSERVER_TEST_"
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=|"
    r"PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://)"
)
"""NAME=value as Kubernetes and Docker links add it for a service called `envserver...`; a port that
is a number is a setting."""
_DOTENV_HINT = "Lines look like NAME=value."


@dataclass(frozen=True)
class Given:
    """A value given in a source.

    Args:
        path: dotted name.
        value: text, or the parsed value of a YAML file; None also for a flag without a value.
        origin: the flag, the variable (after `.env:line` if it comes from there) or `file:line`.
        kind: flag, variable or file.
        is_text: whether `value` must still be parsed by the option's type.
    """

    path: str
    value: Any
    origin: str
    kind: str
    is_text: bool = True

    @property
    def where(self) -> str:
        """Returns the origin for error messages."""
        return f"{self.origin}: {self.path}" if self.kind == "file" else self.origin


def read_variables(environ: Mapping[str, str]) -> list[Given]:
    """Reads variables such as `ENVSERVER_ENV__GROUP_SIZE`; ignores others and Kubernetes' own."""
    return [
        Given(_variable_path(name), value, name, "variable")
        for name, value in sorted(environ.items())
        if _is_setting(name) and not _SERVICE_LINK.match(f"{name.upper()}={value}")
    ]


def read_dotenv(path: Path) -> list[Given]:
    """Reads variables from a `.env` file; a missing file has no settings.
    Raises ConfigError: a line with one of our variables cannot be read.
    """
    if not path.is_file():
        return []
    from dotenv.parser import parse_stream

    given = []
    for binding in parse_stream(_dotenv(path)):
        origin = f"{path.name}:{binding.original.line}"
        if binding.error and VARIABLE_PREFIX in binding.original.string.upper():
            raise ConfigError(f"{origin}: cannot be read.", hint=_DOTENV_HINT)
        if binding.key is None or not _is_setting(binding.key):
            continue
        if binding.value is None:
            raise ConfigError(f"{origin}: {binding.key} has no value.", hint=_DOTENV_HINT)
        origin = f"{origin}: {binding.key}"
        given.append(Given(_variable_path(binding.key), binding.value, origin, "variable"))
    return given


def read_dotenv_values(path: Path, names: Collection[str]) -> dict[str, str]:
    """Reads the variables `names`, which are not ours, from a `.env` file if there is one."""
    if not path.is_file():
        return {}
    from dotenv.parser import parse_stream

    return {
        binding.key: binding.value
        for binding in parse_stream(_dotenv(path))
        if binding.key is not None and binding.key in names
        if binding.value is not None and "\0" not in binding.value
    }


def _dotenv(path: Path) -> io.StringIO:
    """Opens a `.env` file, which may hold bytes of other programs in any encoding."""
    return io.StringIO(read_text(path, errors="surrogateescape"))


class ConfigFile:
    """The values in the file of --config. This base class stands for no file."""

    def read(self, options: Collection[str]) -> list[Given]:
        """Returns every value; `options` (paths) decides which mappings are sections."""
        return []

    def names_in(self, section: str) -> list[str]:
        """Returns the names below `section` (a dotted path) as full paths."""
        return []


def config_file(path: Path | None) -> ConfigFile:
    """Opens the file of --config; None: there is none."""
    if path is None:
        return ConfigFile()
    from .yaml_file import YamlFile  # without a file, commands start without this parser

    return YamlFile(path)


def read_text(path: Path, errors: str = "strict") -> str:
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def _is_setting(name: str) -> bool:
    upper = name.upper()
    return upper.startswith(VARIABLE_PREFIX) and not upper.startswith(_OF_TESTS)


def _variable_path(name: str) -> str:
    path = name[len(VARIABLE_PREFIX) :].lower().replace("__", ".")
    return "environment" if path in ("env", "env.name") else path


def as_list(value: Any) -> list[Any]:
    """Returns `value` if it is a list, else a list of it."""
    return list(value) if isinstance(value, list) else [value]
