"""Converts the rows of data sets to tasks: counts what became of each row, mixes several sets."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from envserver import ConfigError, Task

MAX_UNUSABLE_ROWS = 1000
"""Unusable rows at the start of a data set, before it is taken for the wrong one."""
CAUSES_SHOWN = 8

_logger = logging.getLogger(__name__)


@dataclass
class _Counts:
    read: int = 0
    used: int = 0
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)
    """How many rows by cause, and the place of the first."""


class RowCounts:
    """Counts the rows of each data set: read, used and dropped in the last pass over it."""

    def __init__(self) -> None:
        self._of: dict[str, _Counts] = {}

    def usable(
        self, name: str, read: Iterable[tuple[str, Task | str]], *, hint: str
    ) -> Iterator[Task]:
        """Yields the tasks among `read`, and says at the end what became of the rows.

        Args:
            name: the data set's name.
            read: for each row its place, and its task or why there is none.
            hint: hint of the error if no row is usable.

        Raises:
            ConfigError: there is no task, or none among the first MAX_UNUSABLE_ROWS rows.
        """
        return self.reported(name, self.tasks(name, read), hint=hint)

    def tasks(self, name: str, read: Iterable[tuple[str, Task | str]]) -> Iterator[Task]:
        """Like `usable`, for tasks that are looked at again before `reported` gets them."""
        counts = self._of[name] = _Counts()
        made = False
        for place, task in read:
            counts.read += 1
            if isinstance(task, Task):
                made = True
                yield task
                continue
            self.drop(name, task, place)
            if not made and counts.read >= MAX_UNUSABLE_ROWS:
                return

    @property
    def dropped(self) -> Counter[str]:
        """Number of rows that made no task, by cause."""
        causes: Counter[str] = Counter()
        for counts in self._of.values():
            causes.update({cause: count for cause, (count, _) in counts.dropped.items()})
        return causes

    def drop(self, name: str, cause: str, place: str) -> None:
        """Counts a row that is of no use."""
        dropped = self._of[name].dropped
        count, first = dropped.get(cause, (0, place))
        dropped[cause] = count + 1, first

    def reported(self, name: str, tasks: Iterable[Task], *, hint: str) -> Iterator[Task]:
        """Yields `tasks`; then logs a line with the rows read, used and dropped, by cause."""
        for task in tasks:
            self._of[name].used += 1
            yield task
        counts = self._of.get(name, _Counts())
        if not counts.used:
            why = _causes(counts) or "it is empty"
            raise ConfigError(f"The data set {name!r} has no usable row: {why}.", hint=hint)
        if counts.dropped:
            text = "%s: %d rows read, %d used, %d dropped: %s"
            dropped = sum(count for count, _ in counts.dropped.values())
            _logger.warning(text, name, counts.read, counts.used, dropped, _causes(counts))
        else:
            _logger.info("%s: %d rows read, all used", name, counts.read)


def _causes(counts: _Counts) -> str:
    """The most frequent causes with the first row of each."""
    ordered = sorted(counts.dropped.items(), key=lambda entry: -entry[1][0])
    shown = [
        f"{count} x {cause.rstrip('.')} (first: {place})"
        for cause, (count, place) in ordered[:CAUSES_SHOWN]
    ]
    more = len(ordered) - len(shown)
    return "; ".join([*shown, *([f"and {more} more causes"] if more else [])])


def mixed(streams: Iterable[Iterator[Task]], seed: str) -> Iterator[Task]:
    """Draws from all streams with equal chances until each has ended."""
    rng, left = random.Random(seed), list(streams)
    while left:
        stream = rng.choice(left)
        task = next(stream, None)
        if task is None:
            left.remove(stream)
        else:
            yield task
