"""Keeps the last lines that each rollout of a worker prints, also where several share a process.

What is printed still goes to the server's log. A rollout's own task and threads are known by a
context variable; what a child process prints, or code that leaves the rollout's context, is not
kept here.
"""

from __future__ import annotations

import io
import time
from collections import deque
from contextvars import ContextVar
from typing import IO, Any

from envserver_records.timings import MOST_PRINTED, Stream


class PrintedLines:
    """The last lines of one rollout, `MOST_PRINTED` characters at most."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, Stream, str]] = deque()
        self._begun: dict[Stream, str] = {}
        self._size = 0

    def add(self, stream: Stream, text: str) -> None:
        """Adds what was written; a line is kept when it is complete."""
        *whole, rest = (self._begun.get(stream, "") + text[-MOST_PRINTED:]).split("\n")
        self._begun[stream] = rest[-MOST_PRINTED:]
        for line in whole:
            self._keep(stream, line)

    def taken(self) -> list[tuple[float, Stream, str]]:
        """Returns (time, stream, text) of each line, unfinished ones last."""
        for stream, rest in self._begun.items():
            if rest:
                self._keep(stream, rest)
        self._begun.clear()
        return list(self._lines)

    def _keep(self, stream: Stream, line: str) -> None:
        line = line[-MOST_PRINTED:]
        self._lines.append((time.time(), stream, line))
        self._size += len(line) + 1
        while self._size > MOST_PRINTED and len(self._lines) > 1:
            self._size -= len(self._lines.popleft()[2]) + 1


PRINTING: ContextVar[PrintedLines | None] = ContextVar("envserver_printing", default=None)
"""The lines of the rollout whose code runs."""


class KeptStream(io.TextIOWrapper):
    """A standard stream of a worker that also keeps each rollout's lines."""

    def __init__(self, raw: IO[bytes], stream: Stream) -> None:
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._stream: Stream = stream

    def write(self, text: str, /) -> int:
        """Writes `text`, and keeps it for the rollout that prints."""
        lines = PRINTING.get()
        if lines is not None:
            lines.add(self._stream, text)
        return super().write(text)


def kept_stream(descriptor: int, stream: Stream) -> Any:
    """Returns a text stream that writes to `descriptor`, line by line."""
    return KeptStream(open(descriptor, "wb", closefd=False), stream)
