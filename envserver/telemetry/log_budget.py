"""Limits what one worker or one rollout writes to the server's log."""

from __future__ import annotations

import math

BURST_BYTES = 256 * 1024
BYTES_PER_SECOND = 32 * 1024
COST_OF_A_LINE = 200
"""Cost of logging even an empty line, in bytes of the budget."""


class LogBudget:
    """A budget of log bytes that refills. `now` is the seconds of any monotonic clock.

    Args:
        total_bytes: what may be written altogether; default: no limit.
    """

    def __init__(self, now: float, total_bytes: float = math.inf) -> None:
        self._left = float(BURST_BYTES)
        self._filled_at = now
        self._left_altogether = total_bytes

    def take(self, line_bytes: int, now: float) -> bool:
        """Returns whether a line may be written; it is then paid."""
        earned = (now - self._filled_at) * BYTES_PER_SECOND
        self._left = min(float(BURST_BYTES), self._left + earned)
        self._filled_at = now
        cost = line_bytes + COST_OF_A_LINE
        if cost > min(self._left, self._left_altogether):
            return False
        self._left -= cost
        self._left_altogether -= cost
        return True
