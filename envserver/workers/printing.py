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

_MOST_LINES = 200
_LONGEST_LINE = 1000


class PrintedLines:
    """The last lines of one rollout. Its threads may write at the same time: nothing here fails or
    waits, at worst two unfinished lines are mixed."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, Stream, str]] = deque(maxlen=_MOST_LINES)
        self._begun: dict[Stream, str] = {}

    def add(self, stream: Stream, text: str) -> None:
        """Adds what was written; a line is kept when it is complete."""
        *whole, rest = (self._begun.get(stream, "") + text[-MOST_PRINTED:]).split("\n")
        self._begun[stream] = rest[:_LONGEST_LINE]
        now = time.time()
        self._lines.extend((now, stream, line[:_LONGEST_LINE]) for line in whole)

    def taken(self) -> list[tuple[float, Stream, str]]:
        """Returns (time, stream, text) of the last lines, `MOST_PRINTED` characters at most,
        unfinished ones last."""
        now = time.time()
        unfinished = [(now, stream, rest) for stream, rest in list(self._begun.items()) if rest]
        left = MOST_PRINTED
        kept: list[tuple[float, Stream, str]] = []
        for line in reversed([*self._lines, *unfinished]):
            left -= len(line[2])
            if left < 0:
                break
            kept.append(line)
        return kept[::-1]


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
