"""The document tools of an agent: read a file of its folder page by page, find text in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..calling import Tool, ToolError, toolbox
from .bounded import Limits
from .reading import MEMBER_MARK, Text, to_text

PAGE_CHARACTERS = 10_000
MOST_PAGE_CHARACTERS = 40_000
_AROUND = 200
_MOST_FOUND = 20
_MOST_KEPT = 8
"""Number of documents whose text is cached for their next pages."""


class DocumentReader:
    """Reads documents below `folder` only.

    Args:
        folder: the agent's folder.
    """

    def __init__(self, folder: Path | str, limits: Limits | None = None) -> None:
        self._folder = Path(folder)
        self._limits = limits or Limits()
        self._kept: dict[tuple[object, ...], Text] = {}

    def read(
        self, path: str, member: str = "", offset: int = 0, limit: int = PAGE_CHARACTERS
    ) -> str:
        """Returns one page of a document. Raises ToolError."""
        return page_of(self.text(path, member), self._name(path, member), offset, limit)

    def find(self, path: str, text: str, member: str = "") -> str:
        """Finds `text` in a document. Raises ToolError."""
        return found_in(self.text(path, member), self._name(path, member), text)

    def text(self, path: str, member: str = "") -> Text:
        """Returns a whole document. Raises ToolError."""
        if MEMBER_MARK in path and not member:
            path, _, member = path.partition(MEMBER_MARK)
        file = self._file(path)
        facts = file.stat()
        key = (str(file), member, facts.st_mtime_ns, facts.st_size)
        if key not in self._kept:
            if facts.st_size > self._limits.input_bytes:
                raise ToolError(f"{path} has {facts.st_size:,} bytes: that is too large to read.")
            try:
                data = file.read_bytes()
            except OSError as error:
                raise ToolError(f"{path} cannot be read: {error.strerror}.") from error
            text = to_text(data, file.name, member=member, limits=self._limits)
            while len(self._kept) >= _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = text
        return self._kept[key]

    def _file(self, path: str) -> Path:
        try:
            root = self._folder.resolve()
            file = (root / path).resolve()
            inside = file.is_relative_to(root)
            is_file = inside and file.is_file()
        except (OSError, ValueError, RuntimeError) as error:
            raise ToolError(f"{path[:200]!r} is not a path: {error}.") from error
        if not inside:
            raise ToolError(f"{path[:200]!r} is outside the working folder.")
        if not is_file:
            raise ToolError(f"There is no file {path[:200]!r} here.")
        return file

    def _name(self, path: str, member: str) -> str:
        return f"{path}{MEMBER_MARK}{member}" if member else path


def page_of(text: Text, name: str, offset: int = 0, limit: int = PAGE_CHARACTERS) -> str:
    """Returns the page of `text` that starts at `offset`, below a header line."""
    size = len(text.text)
    if offset and offset >= size:
        raise ToolError(f"{name} ends at character {size:,}; offset {offset:,} is behind that.")
    end = min(size, offset + limit)
    where = "all of it" if (offset, end) == (0, size) else f"{offset:,} to {end:,}"
    facts = [f"{text.kind}, {size:,} characters; shown: {where}", *text.notes]
    if end < size:
        facts.append(f"go on with offset={end}")
    title = f" {text.title!r}" if text.title else ""
    return f"[{name}{title}: {'; '.join(facts)}]\n{text.text[offset:end]}"


def found_in(text: Text, name: str, wanted: str) -> str:
    """Returns the matches of `wanted` in `text`, ignoring case, each with its context."""
    if not wanted.strip():
        raise ToolError("There is nothing to look for.")
    haystack, needle = _folded(text.text), _folded(wanted)
    lines: list[str] = []
    count, at, shown_to = 0, haystack.find(needle), -1
    while at >= 0:
        count += 1
        if len(lines) < _MOST_FOUND and at >= shown_to:
            start, shown_to = max(0, at - _AROUND), at + len(needle) + _AROUND
            excerpt = " ".join(text.text[start:shown_to].split())
            lines.append(f"at {at}: ...{excerpt}...")
        at = haystack.find(needle, at + len(needle))
    if not count:
        return f"[{name}: {wanted[:200]!r} does not occur in its {len(text.text):,} characters]"
    head = f"[{name}: {count} times; offsets into its text]"
    return "\n".join([head, *lines])


def _folded(text: str) -> str:
    """Lowercases `text` if that keeps every character's position."""
    small = text.lower()
    if len(small) == len(text):
        return small
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)


def document_tools(folder: Path | str, limits: Limits | None = None) -> dict[str, Tool]:
    """Returns `read_document` and `find_in_document` for the files below `folder`."""
    reader = DocumentReader(folder, limits)
    return toolbox(
        Tool(_READ, reader.read, MOST_PAGE_CHARACTERS + 2000),
        Tool(_FIND, reader.find, MOST_PAGE_CHARACTERS),
    )


_PATH = {"type": "string", "description": "The file, relative to the working folder."}
_MEMBER = {
    "type": "string",
    "description": "For a zip archive: the member to read, as its listing names it; "
    f"for an archive in an archive: inner.zip{MEMBER_MARK}name.",
}
_READ: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_document",
        "description": "The text of a file: spreadsheets (with formulas and fill colours), PDF, "
        "text documents, slides, mail, books, CSV, JSON, HTML, code, any other text; the members "
        "of a zip archive; the size of an image and what is noted in it; the length of a sound. "
        "Long texts come in pages.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": _PATH,
                "member": _MEMBER,
                "offset": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "The first character of the page; default 0.",
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MOST_PAGE_CHARACTERS,
                    "description": f"Characters of the page; default {PAGE_CHARACTERS}.",
                },
            },
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
_FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_in_document",
        "description": "Where words stand in a file that read_document can read.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": _PATH,
                "text": {"type": "string", "description": "The words to look for."},
                "member": _MEMBER,
            },
            "required": ["path", "text"],
            "additionalProperties": False,
        },
    },
}
