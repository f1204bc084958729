"""`COMMAND --help`: every setting of a command with its docstring, type and default, by section.

With `--env NAME` (or in `python -m environments.NAME`) the environment's own are shown too.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from ..config import EnvironmentConfig, Section
from ..running.options import ANY_NAME, Option, options_of, sections_of
from ..running.validation import with_environment
from .settings import named_environment

_INDENT = "      "
_SOURCES = """\
Each setting can be given, from the weakest, in a YAML file (--config run.yaml), in `.env` or as a
variable (ENVSERVER_ENV__GROUP_SIZE=8), or as a flag (--env.group_size 8)."""


def show_help(
    command_line: Sequence[str],
    *,
    usage: str,
    summary: str,
    settings_class: type[Section],
    aliases: Mapping[str, str] | None = None,
) -> bool:
    """Prints the help where it is asked for; says whether it was.

    Args:
        command_line: the words after the command.
        usage: `envserver process --env NAME`, for example.
        summary: what the command does, in a sentence or two.
        settings_class: as for `load_settings`.
        aliases: short flags -> dotted paths, as for `load_settings`.

    Raises:
        NotFoundError: the environment that is named does not exist.
    """
    if "--help" not in command_line and "-h" not in command_line:
        return False
    words = [word for word in command_line if word not in ("--help", "-h")]
    reference = named_environment(words) if "env" in settings_class.model_fields else None
    model = with_environment(settings_class, reference) if reference else settings_class
    bold, plain = ("\033[1m", "\033[0m") if _colors() else ("", "")
    names = {path: name for name, path in (aliases or {}).items()}
    lines = [f"Usage: {usage} [--name value ...]", "", summary, "", _SOURCES]
    options = options_of(model)
    for title, members in _groups(options, model, reference):
        lines += ["", f"{bold}{title}{plain}"]
        for option in members:
            lines += _lines(option, names.get(option.path, option.path), bold, plain)
    print("\n".join(lines))
    return True


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
                yield f"env: what only {reference} has", own
            yield "env: what every environment has", members
        else:
            title = group.replace(ANY_NAME, "NAME")
            yield f"{title}: {sections[group]}" if group else "General", members


def _lines(option: Option, name: str, bold: str, plain: str) -> list[str]:
    flag = "env" if option.path == "environment" else name.replace(ANY_NAME, "NAME")
    width = min(100, shutil.get_terminal_size((100, 24)).columns) - len(_INDENT)
    text = textwrap.wrap(" ".join(option.description.split()), width, break_on_hyphens=False)
    return [
        f"  {bold}--{flag}{plain} {option.type_name} [{option.default_text}]",
        *(_INDENT + line for line in text),
    ]


def _colors() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
