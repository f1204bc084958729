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
        value: text, or the parsed value of a YAML file; None also for a flag without a value.
        origin: the flag, the variable (after `.env:line` if it comes from there) or `file:line`.
        kind: flag, variable or file.
    """

    path: str
    value: Any
    origin: str
    kind: str
    is_text: bool = True

    @property
    def where(self) -> str:
        return f"{self.origin}: {self.path}" if self.kind == "file" else self.origin


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


class ConfigFile:
    """The values in the file of --config. This base class stands for no file."""

    def read(self, options: Collection[str]) -> list[Given]:
        """Returns every value; `options` (paths) decides which mappings are sections."""
        return []

    def names_in(self, section: str) -> list[str]:
        return []


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


def read_flags(
    command_line: Sequence[str],
    options: Mapping[str, Option],
    *,
    aliases: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> list[Given]:
    """A flag that is not among `options` takes a value if one follows."""
    names = {**ALIASES, **(aliases or {})}
    places = deque(arguments)
    words = deque(command_line)
    given: list[Given] = []
    only_arguments = False
    while words:
        word = words.popleft()
        if word == "--" and arguments and not only_arguments:
            only_arguments = True
        elif not only_arguments and (flag := _flag_name(word, names)) is not None:
            given.append(_flag(word, flag, words, options, names, bool(arguments)))
        elif places and (only_arguments or word == "-" or not word.startswith("-")):
            option = options.get(places[0])
            is_list = option is not None and option.is_list
            path = places[0] if is_list else places.popleft()
            origin = argument_name(path)
            value = [word] if is_list else word
            given.append(Given(path, value, origin, "flag", is_text=not is_list))
        else:
            # After a flag the argument may be half of a secret: it is not repeated.
            what = f"after {given[-1].origin} and its value" if given else repr(word)
            raise ConfigError(f"Unexpected argument {what}.", hint="Settings: --name value.")
    return given


def argument_name(path: str) -> str:
    return path.rpartition(".")[2].upper()


def _flag_name(word: str, names: Mapping[str, str]) -> str | None:
    """None if `word` is not a flag."""
    if word.startswith("--") and word != "--":
        return word[2:]
    return word[1:] if len(word) == 2 and word[0] == "-" and word[1] in names else None


def _flag(
    word: str,
    flag: str,
    words: deque[str],
    options: Mapping[str, Option],
    names: Mapping[str, str],
    has_arguments: bool,
) -> Given:
    name, equals, text = flag.partition("=")
    path = path_of(name, options, names)
    origin = word.partition("=")[0]
    switched_off = path_of(name[3:], options, names) if name[:3] in ("no-", "no_") else ""
    if path not in options and switched_off in options and options[switched_off].is_bool:
        if equals:
            raise ConfigError(f"{origin} takes no value.")
        return Given(switched_off, "false", origin, "flag")
    if equals:
        return Given(path, text, origin, "flag")
    option = options.get(path)
    takes_no_value = option is None or option.is_switch  # None: perhaps of an environment's switch
    if takes_no_value and words and _flag_name(words[0], names):
        return Given(path, None, origin, "flag")  # `--verbose -o FILE`
    if words and _is_value(words[0], option, has_arguments):
        return Given(path, words.popleft(), origin, "flag")
    return Given(path, None, origin, "flag")


def path_of(name: str, options: Mapping[str, Option], names: Mapping[str, str]) -> str:
    path = name.replace("-", "_")
    return path if path in options else names.get(path, path)


def _is_value(word: str, option: Option | None, has_arguments: bool) -> bool:
    if word.startswith("--"):
        return False
    if option is None or not option.is_switch or not has_arguments:
        return True
    is_none = option.allows_none and word.lower() in ("none", "null")
    return is_none or word.lower() in _TRUTH_VALUES
