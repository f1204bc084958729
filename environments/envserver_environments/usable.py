"""Converts the rows of data sets to tasks: counts what became of each row, mixes several sets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from envserver import Task
from envserver.row_counts import RowCounts as RowCounts


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
