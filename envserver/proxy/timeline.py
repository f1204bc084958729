"""Notes when an attempt's tools and programs ran and what it printed, within bounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from envserver_records.timings import (
    MOST_PRINTED,
    MOST_TIMINGS,
    Printed,
    Stream,
    Timing,
    TimingKind,
)

from ..telemetry.redaction import printable, redacted

_LONGEST_NAME = 120
_MOST_LINES = 500
_MOST_SECONDS = 1e9


class Timeline:
    """The times of one attempt, which begins now.

    Args:
        timings: of tools and programs, in order of their ends.
    """

    def __init__(self) -> None:
        self.started_at = time.time()
        self.timings: list[Timing] = []
        self._printed: deque[Printed] = deque()
        self._characters = 0

    @contextmanager
    def timed(self, kind: TimingKind, name: str) -> Iterator[None]:
        """Notes how long the block takes, however it ends."""
        began = time.time()
        try:
            yield
        finally:
            self.note(kind, name, began, time.time() - began)

    def note(self, kind: TimingKind, name: str, began: float, seconds: float) -> None:
        """Notes what began at `time.time()` = `began`."""
        if len(self.timings) < MOST_TIMINGS or kind == "scoring":
            name = printable(name[:_LONGEST_NAME])
            started = self.since_start(began)
            self.timings.append(
                Timing(kind=kind, name=name, started=started, seconds=_rounded(seconds))
            )

    def since_start(self, at: float) -> float:
        """Returns seconds from the start of the attempt; a clock that was set back counts as 0."""
        return _rounded(at - self.started_at)

    def printed(self, at: float, stream: Stream, text: str) -> None:
        """Keeps a line without secrets and control characters; the oldest make room for it."""
        shown = redacted(printable(text[-MOST_PRINTED:], keep="\t"))[-MOST_PRINTED:]
        self._printed.append(Printed(self.since_start(at), stream, shown))
        self._characters += len(shown)
        while self._characters > MOST_PRINTED or len(self._printed) > _MOST_LINES:
            self._characters -= len(self._printed.popleft().text)

    def lines(self) -> list[Printed]:
        """Returns the last lines in order of time."""
        return sorted(self._printed, key=lambda line: line.time)


def _rounded(seconds: float) -> float:
    return round(min(max(0.0, seconds), _MOST_SECONDS), 4)
