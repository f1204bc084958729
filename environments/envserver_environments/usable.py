"""Converts the rows of data sets to tasks: counts unusable rows, mixes several data sets."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator

from envserver import ConfigError, Task

MAX_UNUSABLE_ROWS = 1000
"""Unusable rows at the start of a data set, before it is taken for the wrong one."""

_logger = logging.getLogger(__name__)


def usable_tasks(
    name: str, read: Iterable[Task | str], dropped: Counter[str], *, hint: str
) -> Iterator[Task]:
    """Yields the tasks among `read`; the strings are the reasons why rows are unusable.

    Args:
        name: the data set's name.
        dropped: counts the reasons.
        hint: hint of the error if no row is usable.

    Raises:
        ConfigError: there is no task, or none among the first MAX_UNUSABLE_ROWS.
    """
    used = unusable = 0
    for task in read:
        if isinstance(task, Task):
            used += 1
            yield task
            continue
        unusable += 1
        dropped[task] += 1
        if not used and unusable >= MAX_UNUSABLE_ROWS:
            break
    if unusable:
        _logger.warning("%s: %d rows dropped: %s", name, unusable, reasons(dropped))
    if not used:
        why = reasons(dropped) or "it is empty"
        raise ConfigError(f"The data set {name!r} has no usable row: {why}.", hint=hint)


def reasons(dropped: Counter[str]) -> str:
    """Returns the most common reasons, in a line."""
    return ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common(8))


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
