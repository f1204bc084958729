"""Rows that wait on disk: sixteen bytes of memory each.

In: rows as JSON lines, in reading order. Out: any of them, in any order.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

Json = dict[str, Any]


class Spool:
    """An unnamed temporary file of rows. A context manager."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._offsets = array("Q")
        self._sizes = array("Q")
        self._end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, row: Json) -> int:
        """Adds `row`; returns its number, from 0."""
        return self.add_line(as_line(row))

    def add_line(self, line: bytes) -> int:
        """Likewise for a row that is already a line."""
        self._file.seek(self._end)
        self._file.write(line)
        self._offsets.append(self._end)
        self._sizes.append(len(line))
        self._end += len(line)
        return len(self._offsets) - 1

    def lines(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """Yields the rows with these numbers, as lines."""
        for number in numbers:
            self._file.seek(self._offsets[number])
            yield self._file.read(self._sizes[number])

    def rows(self, numbers: Iterable[int]) -> Iterator[Json]:
        """Yields the rows with these numbers."""
        return (json.loads(line) for line in self.lines(numbers))


def as_line(row: Json) -> bytes:
    """Returns `row` as a line of JSONL: letters unescaped, keys in order.

    An unpaired surrogate is escaped; a value unknown to JSON (a date of a table) becomes text.
    """
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row, default=str).encode() + b"\n"
