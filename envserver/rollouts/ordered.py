"""Makes groups on request: a trainer names the tasks and the number of rollouts.

The ids of an order's groups depend on the order alone, so a repeated request makes no group twice,
even after the server was killed. The filters of the stream do not apply. An order without a waiting
client is given up after a while; its finished groups are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec
import structlog
from envserver_records.errors import NotFoundError, StoreError
from envserver_records.records import Group, Split, Task
from envserver_records.waiting import cancel_and_wait
from structlog.contextvars import bind_contextvars

from ..environment import Environment
from .events import GroupDelivered, OrderSink, dropped
from .group import RolloutContext, make_group
from .policy import Drop, GroupRules
from .stream import GroupRequest, aside, request_for, tasks_of

MOST_TASKS: Final = 100_000
_READ_AT_ONCE: Final = 256
_MOST_NAMED: Final = 5
_LONGEST_ID: Final = 100


@dataclass
class _Page:
    stream: Iterator[Task]
    tasks: list[Task] = field(default_factory=list)
    by_id: dict[str, Task] = field(default_factory=dict)
    is_whole: bool = False
    error: Exception | None = None
    """Why no more tasks can be read; raised when more are needed."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class TaskIndex:
    """The tasks of `environment`, by id."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._pages: dict[Split, _Page] = {}

    async def find(self, split: Split, task_ids: Sequence[str]) -> list[Task]:
        page = self._page(split)
        while any(task_id not in page.by_id for task_id in task_ids) and not page.is_whole:
            await self._read_on(page, len(page.tasks) + 1)
        missing = [task_id for task_id in dict.fromkeys(task_ids) if task_id not in page.by_id]
        if missing:
            shown = (repr(task_id[:_LONGEST_ID]) for task_id in missing[:_MOST_NAMED])
            named = ", ".join(shown) + (" ..." if missing[_MOST_NAMED:] else "")
            raise NotFoundError(
                f"{self.environment.name} has no task {named} among the first {len(page.tasks)} "
                f"of its split {split!r}.",
                hint="GET /v1/tasks lists them.",
            )
        return [page.by_id[task_id] for task_id in task_ids]

    async def after(self, split: Split, number: int, limit: int) -> list[Task]:
        page = self._page(split)
        while len(page.tasks) < number + limit and not page.is_whole:
            await self._read_on(page, number + limit)
        return page.tasks[number : number + limit]

    def _page(self, split: Split) -> _Page:
        if split not in self._pages:
            self._pages[split] = _Page(tasks_of(self.environment, split))
        return self._pages[split]

    async def _read_on(self, page: _Page, wanted: int) -> None:
        async with page.reading:
            if page.is_whole or len(page.tasks) >= wanted:
                return
            if page.error is not None:
                raise page.error
            # The first task may be the one, and each may take long.
            known = len(page.tasks)
            count = min(_READ_AT_ONCE, max(1, known), MOST_TASKS - known)
            read, page.error = await aside(lambda: _take(page.stream, count))
            ended = len(read) < count and page.error is None
            page.is_whole = ended or known + len(read) >= MOST_TASKS
            page.tasks += read
            for task in read:
                page.by_id.setdefault(task.id, task)


def _take(stream: Iterator[Task], count: int) -> tuple[list[Task], Exception | None]:
    read: list[Task] = []
    try:
        read.extend(itertools.islice(stream, count))
    except Exception as error:  # noqa: BLE001 - raised once what came before it is used up
        return read, error
    return read, None


log = structlog.get_logger()

_FORGOTTEN_AFTER_SECONDS: Final = 600.0
_AGAIN_SECONDS: Final = 1.0


class GroupsOrder(msgspec.Struct, frozen=True):
    """A request for groups of `group_size` rollouts, one for each of `task_ids`; the same order
    with the same `key` (the caller's name for it) is the same order."""

    key: str
    environment: str
    split: Split
    task_ids: tuple[str, ...]
    group_size: int

    @property
    def rollouts(self) -> int:
        return len(self.task_ids) * self.group_size

    def group_ids(self) -> list[str]:
        said = msgspec.msgpack.encode(msgspec.structs.astuple(self))
        digest = hashlib.blake2b(said, digest_size=12).hexdigest()
        return [f"ordered-{digest}-{number:05d}" for number in range(len(self.task_ids))]


class _Open:
    def __init__(self, order: GroupsOrder, work: asyncio.Task[None]) -> None:
        self.order = order
        self.work = work
        self.done = 0
        self.waiting = 0
        self.left_at = time.monotonic()


class Orders:
    """All orders of a server; an async context manager that gives them up at its end."""

    def __init__(self, parts: Sequence[RolloutContext], sink: OrderSink) -> None:
        self._parts = {part.environment.name: part for part in parts}
        self._books = {name: TaskIndex(part.environment) for name, part in self._parts.items()}
        self._sink = sink
        self._open: dict[GroupsOrder, _Open] = {}
        self._room: dict[tuple[str, int], asyncio.Semaphore] = {}

    async def __aenter__(self) -> Self:
        self._upkeep = asyncio.create_task(self._give_up_forgotten(), name="forgotten-orders")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._upkeep, *(opened.work for opened in self._open.values())]
        await cancel_and_wait(*tasks)

    @property
    def open_rollouts(self) -> int:
        return sum(opened.order.rollouts for opened in self._open.values())

    def snapshot(self) -> Mapping[str, int]:
        return {"open_orders": len(self._open), "open_rollouts": self.open_rollouts}

    def is_open(self, order: GroupsOrder) -> bool:
        return order in self._open

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def environment(self, name: str) -> Environment:
        if name not in self._parts:
            raise NotFoundError(
                f"This server has no environment {name!r}; it has {', '.join(self._parts)}."
            )
        return self._parts[name].environment

    def book(self, name: str) -> TaskIndex:
        self.environment(name)
        return self._books[name]

    async def wait(self, order: GroupsOrder, seconds: float) -> int:
        """Starts `order` if it is not open yet, and waits for it; returns how many of its groups
        are finished: all of them, unless the time was over."""
        tasks = await self.book(order.environment).find(order.split, order.task_ids)
        made = self._open.get(order)
        if made is None:
            missing = await self._missing(order, tasks)
            if not missing:
                return len(tasks)
            made = self._open.get(order) or self._begin(order, missing)
        made.waiting += 1
        try:
            await asyncio.wait({made.work}, timeout=seconds)
        finally:
            made.waiting -= 1
            made.left_at = time.monotonic()
        if not made.work.done():
            return made.done
        self._open.pop(order, None)
        made.work.result()
        return len(tasks)

    async def _missing(self, order: GroupsOrder, tasks: Sequence[Task]) -> list[GroupRequest]:
        environment, group_ids = self.environment(order.environment), order.group_ids()
        known = await self._sink.known(group_ids)
        return [
            request_for(environment, task, group_id, index, order.split)
            for index, (group_id, task) in enumerate(zip(group_ids, tasks, strict=True))
            if group_id not in known
        ]

    def _begin(self, order: GroupsOrder, missing: list[GroupRequest]) -> _Open:
        made = _Open(
            order, asyncio.create_task(self._make(order, missing), name=f"order-{order.key}")
        )
        made.done = len(order.task_ids) - len(missing)
        self._open[order] = made
        return made

    async def _make(self, order: GroupsOrder, requests: list[GroupRequest]) -> None:
        try:
            async with asyncio.TaskGroup() as groups:
                for request in requests:
                    groups.create_task(self._make_one(order, request), name=request.group_id)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _make_one(self, order: GroupsOrder, request: GroupRequest) -> None:
        context = self._parts[order.environment]
        async with self._room_of(context, order):
            bind_contextvars(group_id=request.group_id, env=request.env)
            made = await make_group(context, request, GroupRules(size=order.group_size, least=0))
            group = _nothing(request, made, order) if isinstance(made, Drop) else made
            await self._put(group)
        if isinstance(made, Drop):
            context.observer(dropped(request, made))
        else:
            context.observer(GroupDelivered(group=made))
        self._open[order].done += 1

    def _room_of(self, context: RolloutContext, order: GroupsOrder) -> asyncio.Semaphore:
        """Limits concurrent groups of this size, so a group's time starts with its rollouts."""
        key = (order.environment, order.group_size)
        if key not in self._room:
            fit = max(1, context.rollouts.max_concurrent // order.group_size)
            self._room[key] = asyncio.Semaphore(fit + 1)
        return self._room[key]

    async def _put(self, group: Group) -> None:
        while True:
            try:
                return await self._sink.put(group)
            except StoreError as error:
                log.error("ordered_group_not_stored", group_id=group.group_id, error=str(error))
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _give_up_forgotten(self) -> None:
        """Cancels orders without a waiting client and forgets finished ones, until cancelled."""
        while True:
            await asyncio.sleep(_FORGOTTEN_AFTER_SECONDS / 4)
            limit = time.monotonic() - _FORGOTTEN_AFTER_SECONDS
            for order, made in list(self._open.items()):
                if made.waiting or made.left_at > limit:
                    continue
                await cancel_and_wait(made.work)
                del self._open[order]
                log.warning("order_abandoned", key=order.key, groups_done=made.done)


def _nothing(request: GroupRequest, drop: Drop, order: GroupsOrder) -> Group:
    lost = {drop.reason: order.group_size}
    return request.group(trajectories=[], asked=order.group_size, lost=lost)
