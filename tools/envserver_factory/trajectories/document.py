"""One document of a file, or the reason why it cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Document:
    """A document, or why it cannot be read.

    Args:
        line: line number from 1, in a file of lines.
        part: name of a part of the file that it is, in a log of Inspect.
        value: the JSON value, None where it cannot be read.
        problem: why it cannot be read.
        bytes: its size.
    """

    path: Path
    line: int | None
    value: Any
    problem: str | None
    bytes: int
    part: str = ""

    @property
    def place(self) -> str:
        """Returns its place for people: `file.json`, or `file.jsonl, line 7`."""
        part = self.part if self.line is None else f"line {self.line}"
        return f"{self.path}, {part}" if part else str(self.path)
