"""Flags and positional arguments of a command line.

In: the arguments after the command, the settings that the command has, and which of them may be
given by position. Out: a `Given` for each value, in the order of the command line. Values stay text
until the type is known; only the form of the command line is checked here.

    --name value   --name=value   --flag   --no-flag   -o value   argument   -- arguments
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from envserver_records.errors import ConfigError

from ..running.options import Option
from .sources import Given

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
    """Reads flags and positional arguments.

    Args:
        command_line: the arguments after the command.
        options: the known settings; a flag that is not among them takes a value if one follows.
        aliases: short names of this command's flags -> dotted paths; they override `ALIASES`.
        arguments: dotted paths of the settings given by position, in order; a list takes all
            remaining arguments.
    """
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
    """Returns the name of the positional argument for `path` in help and errors."""
    return path.rpartition(".")[2].upper()


def _flag_name(word: str, names: Mapping[str, str]) -> str | None:
    """Returns the flag name without leading dashes; None if `word` is not a flag."""
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
    """Returns the dotted path of a flag name."""
    path = name.replace("-", "_")
    return path if path in options else names.get(path, path)


def _is_value(word: str, option: Option | None, has_arguments: bool) -> bool:
    """Returns whether `word`, which follows a flag, is the flag's value."""
    if word.startswith("--"):
        return False
    if option is None or not option.is_switch or not has_arguments:
        return True
    is_none = option.allows_none and word.lower() in ("none", "null")
    return is_none or word.lower() in _TRUTH_VALUES
