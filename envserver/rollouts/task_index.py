"""Finds the tasks of an environment by their ids.

In: the environment's lazy, perhaps endless stream of tasks. Out: those that are asked for. What
holds: the stream of a split is read once, no further than needed, never on the event loop, and at
most `most` of its tasks are known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from envserver_records.errors import NotFoundError
from envserver_records.records import Split, Task

from ..environment import Environment
from .stream import aside, tasks_of

_MOST_TASKS: Final = 100_000
_READ_AT_ONCE: Final = 256
_MOST_NAMED: Final = 5


@dataclass
class _Page:
    """The tasks of one split that were read so far, in order, and the rest of its stream."""

    stream: Iterator[Task]
    tasks: list[Task] = field(default_factory=list)
    by_id: dict[str, Task] = field(default_factory=dict)
    is_whole: bool = False
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class TaskIndex:
    """The tasks of `environment`.

    Args:
        most: tasks of a split that can be named.
    """

    def __init__(self, environment: Environment, most: int = _MOST_TASKS) -> None:
        self._environment = environment
        self._most = most
        self._pages: dict[Split, _Page] = {}

    async def find(self, split: Split, task_ids: Sequence[str]) -> list[Task]:
        """The tasks of these ids, in this order.

        Raises:
            NotFoundError: there is none of one of these ids, or it is not among the first `most`.
            ConfigError: the tasks cannot be read.
        """
        page = self._page(split)
        while any(one not in page.by_id for one in task_ids) and not page.is_whole:
            await self._read_on(page, len(page.tasks) + 1)
        missing = [one for one in dict.fromkeys(task_ids) if one not in page.by_id]
        if missing:
            named = ", ".join(missing[:_MOST_NAMED]) + (" ..." if missing[_MOST_NAMED:] else "")
            raise NotFoundError(
                f"{self._environment.name} has no task {named} among the first {len(page.tasks)} "
                f"of its split {split!r}.",
                hint="GET /v1/tasks lists them.",
            )
        return [page.by_id[one] for one in task_ids]

    async def after(self, split: Split, number: int, limit: int) -> list[Task]:
        """Up to `limit` tasks behind the first `number`, in their order.
        Raises ConfigError: the tasks cannot be read.
        """
        page = self._page(split)
        while len(page.tasks) < number + limit and not page.is_whole:
            await self._read_on(page, number + limit)
        return page.tasks[number : number + limit]

    def _page(self, split: Split) -> _Page:
        if split not in self._pages:
            self._pages[split] = _Page(tasks_of(self._environment, split))
        return self._pages[split]

    async def _read_on(self, page: _Page, wanted: int) -> None:
        """Reads a few tasks more, where fewer than `wanted` are known."""
        async with page.reading:
            count = min(_READ_AT_ONCE, self._most - len(page.tasks))
            if page.is_whole or len(page.tasks) >= wanted:
                return
            read = await aside(lambda: _take(page.stream, count))
            page.is_whole = len(read) < count or len(page.tasks) + len(read) >= self._most
            page.tasks += read
            for task in read:
                page.by_id.setdefault(task.id, task)


def _take(stream: Iterator[Task], count: int) -> list[Task]:
    return [task for _, task in zip(range(count), stream, strict=False)]
