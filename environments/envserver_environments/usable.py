"""From the rows of data sets to tasks: what is of no use is counted, several are mixed."""

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
    """The tasks among `read`; the others are the reasons why their rows are of no use.

    Args:
        name: of the data set.
        dropped: counts the reasons.
        hint: what to look at where no row is of use.

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
    """The most common ones, in a line."""
    return ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common(8))


def mixed(streams: Iterable[Iterator[Task]], seed: str) -> Iterator[Task]:
    """All of them, drawn with equal chances until each is at its end."""
    rng, left = random.Random(seed), list(streams)
    while left:
        stream = rng.choice(left)
        task = next(stream, None)
        if task is None:
            left.remove(stream)
        else:
            yield task
