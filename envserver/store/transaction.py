"""One transaction of the writer, and what it keeps in memory so that nobody has to count rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from .rows import GroupRow
from .schema import groups
from .states import GROUP_STATES, GroupState

T = TypeVar("T")

_IN_LIST: Final = 500
"""Values in one IN (...): databases limit the parameters of a statement."""


@dataclass
class Memory:
    """What is true of the database as of the last commit.

    Args:
        counts: groups in each state.
        next_seq: `seq` of the next group.
        conflicting_puts: puts since opening of an id that was there with another body.
    """

    counts: dict[GroupState, int]
    next_seq: int
    conflicting_puts: int = 0

    def copy(self) -> Memory:
        return Memory(dict(self.counts), self.next_seq, self.conflicting_puts)

    def move(self, rows: Iterable[GroupRow], target: GroupState) -> None:
        for row in rows:
            self.counts[row.state] -= 1
            self.counts[target] += 1


@dataclass(frozen=True)
class Transaction:
    """What an operation works on. Its `memory` becomes the writer's when the commit is durable.

    An operation raises a UsageError only while what it wrote so far is right by itself: the
    transaction goes on without it.
    """

    connection: AsyncConnection
    memory: Memory
    now: float


async def load_memory(connection: AsyncConnection, conflicting_puts: int = 0) -> Memory:
    """Counts what is in the database; the only thing here that grows with it."""
    counts: dict[GroupState, int] = dict.fromkeys(GROUP_STATES, 0)
    query = select(groups.c.state, func.count()).group_by(groups.c.state)
    for state, count in await connection.execute(query):
        counts[state] = count
    last: Any = await connection.scalar(select(func.max(groups.c.seq)))
    return Memory(counts, 1 if last is None else last + 1, conflicting_puts)


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """`items` in pieces that fit one IN (...)."""
    for start in range(0, len(items), _IN_LIST):
        yield items[start : start + _IN_LIST]
