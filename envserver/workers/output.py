"""Cuts the output of workers into lines and limits it, so that a flood does not harm the server.

Bytes go in as they come from the pipe. The lines to be logged come out and, at the end, the last
bytes regardless of the limits (they explain a crash). Neither contains the key of an attempt, or
control characters.
"""

from __future__ import annotations

import math
import re

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
        self._told_at = -math.inf
        self.dropped_bytes = 0
        """Bytes dropped since the last `take_dropped`, without line ends."""

    def feed(self, data: bytes, now: float) -> list[str]:
        """Returns the lines that `data` completes, as far as the budget goes."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return self._within_budget(whole, now)

    def finish(self, now: float) -> list[str]:
        """Returns the last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return self._within_budget([rest], now) if rest else []

    def take_dropped(self, now: float | None = None) -> int:
        """Returns the bytes dropped since the last report.

        With `now`, it returns 0 for a second after a report, so that a flood causes few warnings.
        """
        if not self.dropped_bytes or (now is not None and now < self._told_at + TELL_SECONDS):
            return 0
        if now is not None:
            self._told_at = now
        dropped, self.dropped_bytes = self.dropped_bytes, 0
        return dropped

    def tail(self) -> str:
        """Returns the last bytes written, decoded."""
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
