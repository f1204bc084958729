"""The store's time: near the wall's, but it never goes back and does not jump while it is open.

A lease's length is measured by what passes, also while the machine sleeps; a wall clock that is set
meanwhile changes nothing. A restart begins at the wall's time, or at the last time that the store
has kept when that is later.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def passing_seconds() -> float:
    """Seconds since some moment; they go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Where the wall's clock stood when this was made, plus what has passed since."""

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
    """`source`, moved so that it begins at `earliest` or later, and never goes back."""

    def __init__(self, source: Callable[[], float], earliest: float) -> None:
        self._source = source
        self._offset = max(0.0, earliest - source())
        self._latest = earliest

    def __call__(self) -> float:
        self._latest = max(self._latest, self._source() + self._offset)
        return self._latest
