"""The store's time: close to wall-clock time, but it never jumps or goes back.

A lease lasts as long as it was granted, also while the machine sleeps; setting the wall clock has
no effect on it. A restart begins at the wall clock's time or at the last saved time, whichever is
later.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def passing_seconds() -> float:
    """Returns seconds since an arbitrary moment, counting the time that the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """The wall clock's time at construction, plus the seconds that have passed since."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        passing: Callable[[], float] = passing_seconds,
    ) -> None:
        self._passing = passing
        self._offset = wall() - passing()

    def __call__(self) -> float:
        return self._passing() + self._offset


class ForwardClock:
    """`source`, shifted to begin at `earliest` or later; it never goes back."""

    def __init__(self, source: Callable[[], float], earliest: float) -> None:
        self._source = source
        self._offset = max(0.0, earliest - source())
        self._latest = earliest

    def __call__(self) -> float:
        self._latest = max(self._latest, self._source() + self._offset)
        return self._latest
