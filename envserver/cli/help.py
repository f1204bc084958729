"""`COMMAND --help`: the settings of a command with type, default and docstring.

`--help` shows the frequent settings, each in a line or two; `--help all` shows every setting by
section, `--help SECTION` those of one section. With `--env NAME` (or `python -m environments.NAME`)
they include the environment's own settings.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from ..described import Section
from ..environment_config import EnvironmentConfig
from ..running.options import ANY_NAME, Option, options_of, sections_of, with_environment

_INDENT = "      "
_COLUMN = 34
_MAX_DEFAULT = 60
"""Maximum length of a default that the short help shows, in characters."""
_SOURCES = """\
A setting can be given in a YAML file (--config run.yaml), in `.env` or as an environment variable
(ENVSERVER_ENV__GROUP_SIZE=8), or as a flag (--env.group_size 8); later sources win."""


def help_topic(command_line: Sequence[str]) -> str | None:
    """Returns the requested help: "" for the frequent settings, "all", or a section; None: no
    help."""
    for at, word in enumerate(command_line):
        if word in ("-h", "--help"):
            following = command_line[at + 1] if at + 1 < len(command_line) else ""
            return "" if following.startswith("-") else following
    return None


def show_help(
    topic: str,
    *,
    usage: str,
    summary: str,
    settings_class: type[Section],
    reference: str | None = None,
    names: Mapping[str, str] | None = None,
    frequent: Sequence[str] = (),
) -> None:
    """Prints the help of a command.

    Args:
        topic: "" for the frequent settings, "all", or a section.
        usage: `envserver process --env NAME`, for example.
        summary: what the command does, in one or two sentences.
        settings_class: as for `load_settings`.
        reference: the given environment.
        names: dotted path -> the displayed name: `--port` or `SOURCE`.
        frequent: dotted paths of the settings to show first; empty: all of them.
    """
    model = with_environment(settings_class, reference) if reference else settings_class
    options = options_of(model)
    groups = dict(_groups(options, model, reference))
    sections = [title for title in groups if title.partition(":")[0].split(".")[0] == topic]
    bold, plain = ("\033[1m", "\033[0m") if _colors() else ("", "")
    lines = [f"Usage: {usage} [--name value ...]", "", summary]
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


def _only(reference: str | None) -> str:
    return f"env: settings of {reference} only"


def _more(options: Mapping[str, Option], groups: Mapping[str, list[Option]]) -> list[str]:
    names = [title.partition(":")[0].split(".")[0] for title in groups]
    sections = ", ".join(dict.fromkeys(name for name in names if name != "General"))
    text = f"All {len(options)} settings: --help all. One section: --help SECTION ({sections})."
    return [*textwrap.wrap(text, 100), _SOURCES]


def _name(path: str, names: Mapping[str, str] | None) -> str:
    return (names or {}).get(path) or f"--{path.replace(ANY_NAME, 'NAME')}"


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
        if group == "env":
            if own:
                yield _only(reference), own
            yield "env: settings of every environment", members
        else:
            title = group.replace(ANY_NAME, "NAME")
            yield f"{title}: {sections[group]}" if group else "General", members


def _short_lines(option: Option, name: str, bold: str, plain: str) -> list[str]:
    """Formats a setting in two columns: name, then the first sentence of its docstring and the
    default."""
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
