"""Shards of an evaluation: `--shard 2/4` takes the second of every four tasks.

What holds: the shards of a stream have all of its tasks, each once, with the group ids that a whole
run gives them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from envserver_records.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Shard `number` (from 1) of `count`."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}" if self.count > 1 else ""

    def taken(self, stream: Iterable[T]) -> Iterator[T]:
        """Yields the items of a stream that belong to this shard."""
        return itertools.islice(stream, self.number - 1, None, self.count)

    def size(self, total: int | None) -> int | None:
        """Returns how many of `total` items belong to this shard; None if that is not known."""
        return None if total is None else len(range(self.number - 1, total, self.count))


def shard_of(text: str) -> Shard:
    """Parses "2/4"; "" is the whole. Raises ConfigError: it is not a shard."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard()
    if (text and not found) or not 1 <= shard.number <= shard.count:
        raise ConfigError(f"--shard {text!r} is not a shard, such as 1/4 or 4/4.")
    return shard
