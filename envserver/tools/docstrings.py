"""Reads the docstring of a tool: what it does, and what each argument is."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note):")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SHOWN = ("Returns", "Example", "Examples", "Note")
"""Sections that a model reads, too."""


@dataclass(frozen=True)
class Docstring:
    """A docstring in Google's form: the text for the model, and descriptions of arguments."""

    description: str
    arguments: dict[str, str]


def parse_docstring(text: str) -> Docstring:
    """Parses a docstring as `inspect.getdoc` returns it."""
    section, shown, described = "", [], []
    for line in text.splitlines():
        head = _SECTION.fullmatch(line.rstrip())
        section = head[1] if head else section
        if section in ("Args", "Arguments", "Parameters"):
            described += [] if head else [line]
        elif section == "" or section in _SHOWN:
            shown.append(line.rstrip())
    return Docstring("\n".join(shown).strip(), _arguments(described))


def _arguments(lines: list[str]) -> dict[str, str]:
    """Reads `name: text`; lines that are indented further continue the text."""
    arguments: dict[str, str] = {}
    indent, last = None, ""
    for line in lines:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        begun = _ARGUMENT.fullmatch(line.strip()) if depth <= indent else None
        if begun:
            last = begun[1]
            arguments[last] = begun[2]
        elif last:
            arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return arguments
