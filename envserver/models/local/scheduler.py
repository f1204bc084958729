"""Decides which rows join the batch, and when. Pure: no torch and no clock.

Rows join in order of arrival as soon as a slot is free; none joins while sampling is paused. What
always holds: a row is in exactly one state: waiting, running or gone.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from .rows import Row

PauseMode = Literal["abort", "wait", "keep"]


class Scheduler:
    """
    Args:
        most_rows: that run at the same time.
        most_tokens: places of the padded cache, rows times the longest row's tokens.
    """

    def __init__(self, most_rows: int, most_tokens: int) -> None:
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.paused: PauseMode | None = None
        self._most_rows = most_rows
        self._most_tokens = most_tokens

    @property
    def steps(self) -> bool:
        """Whether there is something to do now."""
        if self.paused == "keep":
            return False
        return bool(self.running) or self._next() is not None

    @property
    def share(self) -> float:
        """Of the cache's places, those in use."""
        running = list(self.running)
        return self._places(running) / self._most_tokens if running else 0.0

    def submit(self, row: Row) -> None:
        """Puts a row at the end of the queue."""
        self.waiting.append(row)

    def admitted(self) -> list[Row]:
        """The rows that run from now on."""
        joining: list[Row] = []
        while (row := self._next()) is not None and self._fits(row):
            self.waiting.popleft()
            self.running.append(row)
            joining.append(row)
        return joining

    def displaced(self) -> list[Row]:
        """The rows that have to leave because the others grew; they wait first in line.

        The one that came last goes first, and one always stays.
        """
        leaving: list[Row] = []
        while len(self.running) > 1 and self._places(self.running) > self._most_tokens:
            row = self.running.pop()
            self.waiting.appendleft(row)
            leaving.append(row)
        return leaving

    def remove(self, row: Row) -> bool:
        """Takes a row out, wherever it is; whether it was running."""
        if row in self.running:
            self.running.remove(row)
            return True
        if row in self.waiting:
            self.waiting.remove(row)
        return False

    def _next(self) -> Row | None:
        """The row that is first in line; one that had begun ends before a pause that waits."""
        row = self.waiting[0] if self.waiting else None
        if self.paused is None or (self.paused == "wait" and row is not None and row.ids):
            return row
        return None

    def _fits(self, row: Row) -> bool:
        if len(self.running) >= self._most_rows:
            return False
        return not self.running or self._places([*self.running, row]) <= self._most_tokens

    @staticmethod
    def _places(rows: list[Row]) -> int:
        return len(rows) * (1 + max(len(row.prompt) + len(row.ids) for row in rows))
