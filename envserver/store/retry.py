"""Decides whether a database that did not answer may be asked again yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from envserver_records.backoff import Backoff
from envserver_records.errors import StoreError

_BACKOFF: Final = Backoff(first_seconds=0.1, max_seconds=5.0)


class DatabaseUnreachable(StoreError):
    """The database did not answer, or the next retry is not due yet."""


class RetryGate:
    """Rejects calls at once until the next retry is due; retries are 0.1 to 5 seconds apart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._next_try = 0.0
        self._why = ""

    def check(self) -> None:
        """Raises DatabaseUnreachable if the last try failed and the next one is not due yet."""
        left = self._next_try - self._clock()
        if left > 0:
            raise DatabaseUnreachable(self._why, hint=f"The next retry is in {left:.1f} seconds.")

    def failed(self, error: DatabaseUnreachable) -> None:
        """Records a failed try; the pause grows with each one. Rejections by `check` do not
        count.
        """
        if self._next_try > self._clock():
            return
        self._why = error.message
        self._failures += 1
        self._next_try = self._clock() + _BACKOFF.seconds(self._failures)

    def open(self) -> None:
        """Lets the next call try, because the database answers again."""
        self._next_try = 0.0

    def worked(self) -> None:
        """Resets the pause after a success."""
        self._failures = 0
