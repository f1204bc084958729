"""Finds the groups in files, in one pass that can go on when a file has grown.

In: paths. Out: `Found` for each group, in order, and the error of each line that is none. What
holds: a last line without an end is left for the next pass unless it is whole; documents of one
task that follow each other are one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import orjson
from envserver_records.errors import InputError

from ..export.stored_files import decoded, is_json, opened
from .lines import LineFacts, facts_of_line

_BUFFER: Final = 1 << 20
_COMPRESSED: Final = (".gz", ".zst")
_MOST_ROLLOUTS: Final = 256
"""Documents of one task beyond this are another group."""


class Found(msgspec.Struct, frozen=True):
    """A group of a file.

    Args:
        start, length: where its line is, in bytes; line: its number.
        body: the group as a line of its own, where the file does not have it so; else None.
    """

    facts: LineFacts
    start: int
    length: int
    line: int
    body: bytes | None


class FileScan:
    """One file of groups or documents.

    Args:
        offset, line: bytes and lines that are known already.
    """

    def __init__(self, path: Path, offset: int = 0, line: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.line = line
        self.disk_bytes = 0
        """Bytes read, as they are on disk."""
        self.is_compressed = path.name.endswith(_COMPRESSED)
        self.is_document = path.name.endswith(".json")

    def found(self, documents: Documents) -> Iterator[Found | InputError]:
        """Yields what comes after `offset`, which moves on.

        Args:
            documents: takes the documents, which become groups later.
        """
        if self.is_document:
            yield from self._document(documents)
            return
        try:
            if self.is_compressed:
                with opened(self.path, self._count) as file:
                    yield from self._lines(file, documents)
            else:
                with self.path.open("rb", buffering=_BUFFER) as file:
                    self._go_on(file)
                    yield from self._lines(file, documents)
        except InputError as error:  # a compressed file is damaged
            yield error
        except OSError as error:
            yield InputError(f"{self.path} cannot be read: {error.strerror}.")

    def _go_on(self, file: IO[bytes]) -> None:
        """Goes to `offset`, and past the end of a line that was whole without it."""
        file.seek(max(0, self.offset - 1))
        if self.offset and file.read(1) != b"\n" and file.read(1) == b"\n":
            self.offset += 1
        file.seek(self.offset)

    def _count(self, read: int) -> None:
        self.disk_bytes += read

    def _lines(self, file: IO[bytes], documents: Documents) -> Iterator[Found | InputError]:
        for line in file:
            if not line.endswith(b"\n") and not is_json(line):
                return  # it is being written, or its writer was killed
            start, self.offset, self.line = self.offset, self.offset + len(line), self.line + 1
            if not self.is_compressed:
                self.disk_bytes = self.offset
            if line.strip():
                yield from self._of_line(line, start, documents)

    def _of_line(
        self, line: bytes, start: int, documents: Documents
    ) -> Iterator[Found | InputError]:
        place = f"{self.path}, line {self.line}"
        try:
            facts = facts_of_line(line, place)
            if facts is None:
                yield from documents.add(decoded(line, place), place)
                return
        except InputError as error:
            yield error
            return
        yield from documents.flush()
        body = line if self.is_compressed else None
        yield Found(facts, start, len(line), self.line, body)

    def _document(self, documents: Documents) -> Iterator[Found | InputError]:
        try:
            data = self.path.read_bytes()
            self.offset = self.disk_bytes = len(data)
            yield from documents.add(decoded(data, str(self.path)), str(self.path))
        except InputError as error:
            yield error
        except OSError as error:
            yield InputError(f"{self.path} cannot be read: {error.strerror}.")


class Documents:
    """Collects documents of one task, until one of another task comes."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []
        self._place = ""
        self._task = ("", "")

    @property
    def are_waiting(self) -> bool:
        """Whether there are documents that are not yet a group."""
        return bool(self._waiting)

    def add(self, value: Any, place: str) -> Iterator[Found | InputError]:
        """Takes a document; yields the group that it ends.
        Raises InputError: it is not a document.
        """
        from .documents import task_of, unified_document

        document = unified_document(value, place)
        task = task_of(document)
        is_other = not self._waiting or task != self._task
        if is_other or len(self._waiting) >= _MOST_ROLLOUTS:
            yield from self.flush()
            self._task, self._place = task, place
        self._waiting.append(document)

    def flush(self) -> Iterator[Found | InputError]:
        """Yields the group of the documents so far, if there are any."""
        if not self._waiting:
            return
        from .documents import group_of_documents

        documents, self._waiting = self._waiting, []
        task, self._task = self._task, ("", "")
        try:
            line = group_of_documents(documents, task[1])
            body = orjson.dumps(line, default=str)
            facts = facts_of_line(body, self._place)
            if facts is None:
                raise ValueError("a value has another form than it should")
        except (InputError, TypeError, ValueError, LookupError, AttributeError) as error:
            yield InputError(f"{self._place} is not a trajectory: {error}.", place=self._place)
        else:
            yield Found(facts, 0, 0, 0, body)
