"""What workers print, cut into lines and bounded: a flood costs its writer, never the server.

Bytes go in as they come from the pipe; out come the lines worth passing on and, at the end, the
last bytes whatever the bounds said (a crash explains itself there). No key of an attempt is in
either.
"""

from __future__ import annotations

import math
import re

MAX_LINE_BYTES = 4096
BURST_BYTES = 256 * 1024
BYTES_PER_SECOND = 32 * 1024
TAIL_BYTES = 2048
TELL_SECONDS = 1.0

_KEY = re.compile(r"(?<=/r/)[A-Za-z0-9_-]{20,}")
"""In the address of an attempt, as HTTP libraries log it."""
_COST_OF_A_LINE = 200
"""What logging even an empty line costs, in bytes of the budget."""


class OutputLimiter:
    """The output of one worker. `now` is any monotonic clock's seconds."""

    def __init__(self, now: float) -> None:
        self._budget = float(BURST_BYTES)
        self._filled_at = now
        self._rest = b""
        self._tail = b""
        self._told_at = -math.inf
        self.dropped_bytes = 0
        """Dropped since the last `take_dropped`, ends of lines not counted."""

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that `data` completes, as far as the budget goes."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return self._within_budget(whole, now)

    def finish(self, now: float) -> list[str]:
        """The last line, when it had no end."""
        rest, self._rest = self._rest, b""
        return self._within_budget([rest], now) if rest else []

    def take_dropped(self, now: float | None = None) -> int:
        """Bytes dropped since they were last told.

        With `now`, 0 for a second after that: a flood is no reason for a flood of warnings.
        """
        if not self.dropped_bytes or (now is not None and now < self._told_at + TELL_SECONDS):
            return 0
        if now is not None:
            self._told_at = now
        dropped, self.dropped_bytes = self.dropped_bytes, 0
        return dropped

    def tail(self) -> str:
        """The last bytes written, decoded."""
        return _decoded(self._tail).strip()

    def _within_budget(self, lines: list[bytes], now: float) -> list[str]:
        earned = (now - self._filled_at) * BYTES_PER_SECOND
        self._budget = min(float(BURST_BYTES), self._budget + earned)
        self._filled_at = now
        passed = []
        for line in lines:
            shown = line[:MAX_LINE_BYTES]
            cost = len(shown) + _COST_OF_A_LINE
            if cost > self._budget:
                self.dropped_bytes += len(line)
                continue
            self._budget -= cost
            self.dropped_bytes += len(line) - len(shown)
            passed.append(_decoded(shown).rstrip("\r"))
        return passed


def _decoded(text: bytes) -> str:
    return _KEY.sub("***", text.decode(errors="replace"))
