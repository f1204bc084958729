"""Limits what one worker or one rollout writes to the server's log."""

from __future__ import annotations

import math

from ..buckets import Bucket

BURST_BYTES = 256 * 1024
BYTES_PER_SECOND = 32 * 1024
COST_OF_A_LINE = 200
"""Cost of logging even an empty line, in bytes of the budget."""


class LogBudget:
    """A bucket of log bytes. `now` is the seconds of any monotonic clock.

    Args:
        total_bytes: what may be written altogether; default: no limit.
    """

    def __init__(self, now: float, total_bytes: float = math.inf) -> None:
        self._bucket = Bucket(BYTES_PER_SECOND, BURST_BYTES, now)
        self._left_altogether = total_bytes

    def take(self, line_bytes: int, now: float) -> bool:
        """Returns whether a line may be written; it is then paid."""
        cost = line_bytes + COST_OF_A_LINE
        if cost > self._left_altogether or self._bucket.wait_seconds(cost, now):
            return False
        self._bucket.take(cost, now)
        self._left_altogether -= cost
        return True
