"""A circuit breaker: decides whether calls may go to a replica. No I/O.

Closed: calls go there. Open: none do, because it refused a connection, missed a health check, or
failed half of its recent calls. Half-open: one call at a time tests it; a success closes the
breaker, a failure opens it for twice as long. Results of calls that began before it opened are
ignored.

A request that is itself at fault (HTTP 4xx) counts as a success: the replica answered it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from envserver_records.backoff import Backoff

State = Literal["closed", "open", "half_open"]

_WINDOW_SECONDS = 30.0
_RECENT = 10
_FAILURES = 5
"""Failures among the last calls, within the window, that open it."""
_ASIDE = Backoff(first_seconds=0.5, max_seconds=30.0)


class Breaker:
    """The breaker of one replica. Times are those of `clock`, in seconds.

    Args:
        reason: why it opened last.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.reason = ""
        self._clock = clock
        self._failed_at: deque[float | None] = deque(maxlen=_RECENT)
        self._opened_at: float | None = None
        self._until = 0.0
        self._openings = 0
        self._unwell = False
        self._by_calls = False
        self._trying = 0

    @property
    def state(self) -> State:
        if self._opened_at is None:
            return "closed"
        return "open" if self._unwell or self._clock() < self._until else "half_open"

    @property
    def allows(self) -> bool:
        """Whether a call may begin now."""
        state = self.state
        return state == "closed" or (state == "half_open" and not self._trying)

    @property
    def until(self) -> float:
        """The time at which it becomes half-open."""
        return self._until

    def begin(self) -> bool:
        """Registers a call; returns whether it is a test call, for `end`."""
        tries = self._opened_at is not None
        self._trying += tries
        return tries

    def end(self, tries: bool) -> None:
        """Registers the end of a call, whether or not it reported a result."""
        self._trying -= tries

    def succeeded(self, begun_at: float) -> None:
        """A call that began at `begun_at` was answered."""
        if self._opened_at is None:
            self._failed_at.append(None)
        elif begun_at >= self._opened_at:
            self._close()

    def failed(self, begun_at: float, reason: str) -> None:
        """A call that began at `begun_at` failed or was not answered."""
        if self._opened_at is None:
            self._failed_at.append(self._clock())
            if self._recent_failures() >= _FAILURES:
                self._open(reason, by_calls=True)
        elif begun_at >= self._opened_at and self.state == "half_open":
            self._open(reason, by_calls=True)

    def refused(self, reason: str) -> None:
        """Registers a refused connection."""
        if self.state != "open":
            self._open(reason, by_calls=False)

    def checked(self, well: bool, reason: str = "") -> None:
        """Registers a health check. A healthy result closes the breaker unless calls opened it."""
        self._unwell = not well
        if self._opened_at is None:
            if not well:
                self._open(reason, by_calls=False)
        elif well and not self._by_calls:
            self._close()

    def _open(self, reason: str, *, by_calls: bool) -> None:
        self._openings += 1
        self._opened_at = self._clock()
        self._until = self._opened_at + _ASIDE.seconds(self._openings)
        self._by_calls = by_calls
        self.reason = reason

    def _close(self) -> None:
        self._opened_at = None
        self._openings = 0
        self._unwell = self._by_calls = False
        self._failed_at.clear()

    def _recent_failures(self) -> int:
        since = self._clock() - _WINDOW_SECONDS
        return sum(at is not None and at >= since for at in self._failed_at)
