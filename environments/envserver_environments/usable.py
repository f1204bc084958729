"""Converts the rows of data sets to tasks: counts what became of each row, mixes several sets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from envserver import InputError, Task
from envserver.row_counts import RowCounts as RowCounts

from .rows import NumberedRow, Row

T = TypeVar("T")


def made(
    rows: Iterable[NumberedRow], make: Callable[[Row, NumberedRow], T]
) -> Iterator[tuple[str, T | str]]:
    """Yields the place of each row, and what `make` returns for it.

    Where the row cannot be read, or `make` raises InputError, the message takes its place.
    """
    for one in rows:
        try:
            if one.row is None:
                raise InputError(one.problem)
            result: T | str = make(one.row, one)
        except InputError as error:
            result = error.message
        yield one.place, result


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
