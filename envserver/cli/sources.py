"""Sources of settings: the command line, environment variables, `.env`.

Each reader returns `Given`s. Text is parsed later, when the type is known; only the form of the
source is checked here. A command line has

    --name value   --name=value   --flag   --no-flag   -o value   argument   -- arguments
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envserver_records.errors import ConfigError

from ..running.options import Option

if TYPE_CHECKING:
    from dotenv.parser import Binding

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
        value: text, the parsed value of a YAML file, or a list with one positional argument; None
            also for a flag without a value.
        origin: the flag, the variable (after `.env:line` if it comes from there) or `file:line`.
        kind: flag, variable or file.
    """

    path: str
    value: Any
    origin: str
    kind: str

    @property
    def where(self) -> str:
        return f"{self.origin}: {self.path}" if self.kind == "file" else self.origin

    def parsed(self, option: Option) -> Any:
        if self.kind == "file" or isinstance(self.value, list):
            return self.value
        if self.value is not None:
            return option.parse(self.value)
        if option.is_bool:
            return True
        raise ValueError(f"a value is needed ({option.type_name})")


def read_variables(environ: Mapping[str, str]) -> list[Given]:
    """Reads variables such as `ENVSERVER_ENV__GROUP_SIZE`; ignores Kubernetes' own."""
    return [
        Given(_variable_path(name), value, name, "variable")
        for name, value in sorted(environ.items())
        if _is_setting(name) and not _SERVICE_LINK.match(f"{name.upper()}={value}")
    ]


def read_dotenv(path: Path) -> list[Given]:
    given = []
    for binding in _bindings(path):
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
    return {
        binding.key: binding.value
        for binding in _bindings(path)
        if binding.key is not None and binding.key in names
        if binding.value is not None and "\0" not in binding.value
    }


def _bindings(path: Path) -> list[Binding]:
    """The file may be missing, and hold bytes of other programs in any encoding."""
    if not path.is_file():
        return []
    from dotenv.parser import parse_stream

    return list(parse_stream(io.StringIO(read_text(path, errors="surrogateescape"))))


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
    return list(value) if isinstance(value, list) else [value]


ALIASES = {
    "agent": "agent.name",
    "env": "environment",
    "env.name": "environment",
    "host": "server.host",
    "port": "server.port",
    "json": "as_json",
    "o": "out",
    "store.shared": "store_shared",
}
"""Short flag names, for every command that has the setting and no other setting of that name."""

_TRUTH_VALUES = {"true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0"}


class FlagReader:
    """Reads the command line of a command with these settings.

    Args:
        aliases: other names of flags.
        arguments: paths of the settings that are given by position.
    """

    def __init__(
        self, options: Mapping[str, Option], aliases: Mapping[str, str], arguments: Sequence[str]
    ) -> None:
        self._options = options
        self._aliases = aliases
        self._arguments = arguments

    def path_of(self, name: str) -> str:
        path = name.replace("-", "_")
        return path if path in self._options else self._aliases.get(path, path)

    def read(self, command_line: Sequence[str]) -> list[Given]:
        """A flag that is not among the options takes a value if one follows."""
        places, words = deque(self._arguments), deque(command_line)
        given: list[Given] = []
        only_arguments = False
        while words:
            word = words.popleft()
            if word == "--" and self._arguments and not only_arguments:
                only_arguments = True
            elif not only_arguments and (name := self._name(word)) is not None:
                path, value = self._flag(name, words)
                given.append(Given(path, value, word.partition("=")[0], "flag"))
            elif places and (only_arguments or word == "-" or not word.startswith("-")):
                option = self._options.get(places[0])
                if option is not None and option.is_list:
                    given.append(Given(places[0], [word], argument_name(places[0]), "flag"))
                else:
                    path = places.popleft()
                    given.append(Given(path, word, argument_name(path), "flag"))
            else:
                # After a flag the argument may be half of a secret: it is not repeated.
                what = f"after {given[-1].origin} and its value" if given else repr(word)
                raise ConfigError(f"Unexpected argument {what}.", hint="Settings: --name value.")
        return given

    def _name(self, word: str) -> str | None:
        """None if `word` is not a flag."""
        if word.startswith("--") and word != "--":
            return word[2:]
        return word[1:] if len(word) == 2 and word[0] == "-" and word[1] in self._aliases else None

    def _flag(self, flag: str, following: deque[str]) -> tuple[str, str | None]:
        """Returns path and value, which is taken from the `following` words."""
        name, equals, text = flag.partition("=")
        path = self.path_of(name)
        off = self.path_of(name[3:]) if name[:3] in ("no-", "no_") else ""
        if path not in self._options and off in self._options and self._options[off].is_bool:
            if equals:
                raise ConfigError(f"--{name} takes no value.")
            return off, "false"
        if equals:
            return path, text
        return path, following.popleft() if following and self._is_value(
            following[0], path
        ) else None

    def _is_value(self, word: str, path: str) -> bool:
        option = self._options.get(path)
        if word.startswith("--"):
            return False
        if option is not None and not option.is_switch:
            return True
        if self._name(word):  # `--verbose -o FILE`; None: perhaps a switch of an environment
            return False
        if option is None or not self._arguments:
            return True
        is_none = option.allows_none and word.lower() in ("none", "null")
        return is_none or word.lower() in _TRUTH_VALUES


def argument_name(path: str) -> str:
    return path.rpartition(".")[2].upper()
