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
    """Decides which rows run.

    Args:
        most_rows: maximum number of rows that run at the same time.
        most_tokens: places of the padded cache: rows times the tokens of the longest row.
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
        """Share of the cache's places in use."""
        running = list(self.running)
        return self._places(running) / self._most_tokens if running else 0.0

    def submit(self, row: Row) -> None:
        """Adds a row to the end of the queue."""
        self.waiting.append(row)

    def admitted(self) -> list[Row]:
        """Moves rows from the queue to the batch and returns them."""
        joining: list[Row] = []
        while (row := self._next()) is not None and self._fits(row):
            self.waiting.popleft()
            self.running.append(row)
            joining.append(row)
        return joining

    def displaced(self) -> list[Row]:
        """Returns the rows that must leave because others grew; they go to the front of the queue.

        The row that came last leaves first; one row always stays.
        """
        leaving: list[Row] = []
        while len(self.running) > 1 and self._places(self.running) > self._most_tokens:
            row = self.running.pop()
            self.waiting.appendleft(row)
            leaving.append(row)
        return leaving

    def remove(self, row: Row) -> bool:
        """Removes a row from the queue or the batch; returns whether it was running."""
        if row in self.running:
            self.running.remove(row)
            return True
        if row in self.waiting:
            self.waiting.remove(row)
        return False

    def _next(self) -> Row | None:
        """Returns the first row of the queue.

        During a pause that lets rows finish, only rows that had begun may continue.
        """
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
