"""Cuts the output of workers into lines and limits it, so that a flood does not harm the server.

The last bytes are kept regardless of the limits (they explain a crash). Neither they nor the lines
contain the key of an attempt, or control characters.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections import deque
from contextvars import ContextVar
from typing import IO, Any

from envserver_records.timings import MOST_PRINTED, Stream

from ..telemetry.redaction import LogBudget, printable

MAX_LINE_BYTES = 4096
TAIL_BYTES = 2048
TELL_SECONDS = 1.0

_KEY = re.compile(r"(?<=/r/)[A-Za-z0-9_-]{20,}")
"""The key in the address of an attempt, as HTTP libraries log it."""


class OutputLimiter:
    """The output of one worker. `now` is the seconds of any monotonic clock."""

    def __init__(self, now: float) -> None:
        self._budget = LogBudget(now)
        self._rest = b""
        self._tail = b""
        self._reported_at = -math.inf
        self.dropped_bytes = 0
        """Since the last `take_dropped`, without line ends."""

    def feed(self, data: bytes, now: float) -> list[str]:
        """Returns the lines that `data` completes, as far as the budget goes."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return self._within_budget(whole, now)

    def finish(self, now: float) -> list[str]:
        rest, self._rest = self._rest, b""
        return self._within_budget([rest], now) if rest else []

    def take_dropped(self, now: float | None = None) -> int:
        """Returns the bytes dropped since the last report.

        With `now`, it returns 0 for a second after a report, so that a flood causes few warnings.
        """
        if not self.dropped_bytes or (now is not None and now < self._reported_at + TELL_SECONDS):
            return 0
        if now is not None:
            self._reported_at = now
        dropped, self.dropped_bytes = self.dropped_bytes, 0
        return dropped

    def tail(self) -> str:
        return _decoded(self._tail).strip()

    def _within_budget(self, lines: list[bytes], now: float) -> list[str]:
        passed = []
        for line in lines:
            shown = line[:MAX_LINE_BYTES]
            if not self._budget.take(len(shown), now):
                self.dropped_bytes += len(line)
                continue
            self.dropped_bytes += len(line) - len(shown)
            passed.append(_decoded(shown).rstrip("\r"))
        return passed


def _decoded(text: bytes) -> str:
    return printable(_KEY.sub("***", text.decode(errors="replace")), keep="\n\t")


# What is printed still goes to the server's log. A rollout's own task and threads are known by a
# context variable; what a child process prints, or code that leaves the rollout's context, is not
# kept here.

_MOST_LINES = 200
_LONGEST_LINE = 1000


class PrintedLines:
    """The last lines of one rollout. Its threads may write at the same time: nothing here fails or
    waits, at worst two unfinished lines are mixed."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, Stream, str]] = deque(maxlen=_MOST_LINES)
        self._begun: dict[Stream, str] = {}

    def add(self, stream: Stream, text: str) -> None:
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
        lines = PRINTING.get()
        if lines is not None:
            lines.add(self._stream, text)
        return super().write(text)


def kept_stream(descriptor: int, stream: Stream) -> Any:
    return KeptStream(open(descriptor, "wb", closefd=False), stream)
