"""Whether a database that did not answer is asked again yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from envserver_records.backoff import Backoff
from envserver_records.errors import StoreError

_BACKOFF: Final = Backoff(first_seconds=0.1, max_seconds=5.0)


class DatabaseUnreachable(StoreError):
    """The database did not answer, or it is too early to ask it again."""


class Reach:
    """Refuses at once while the next try is not due: tries are 0.1 to 5 seconds apart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._next_try = 0.0
        self._why = ""

    def check(self) -> None:
        """Raises DatabaseUnreachable: the last try failed, and it is too early for another."""
        left = self._next_try - self._clock()
        if left > 0:
            raise DatabaseUnreachable(self._why, hint=f"It is tried again in {left:.1f} seconds.")

    def failed(self, error: DatabaseUnreachable) -> None:
        """The next try has to wait, each time longer. A refusal by `check` was no try."""
        if self._next_try > self._clock():
            return
        self._why = error.message
        self._failures += 1
        self._next_try = self._clock() + _BACKOFF.seconds(self._failures)

    def worked(self) -> None:
        """The next failure waits as if it were the first."""
        self._failures = 0
