"""The stream of group requests of a run: endless or one pass, repeatable after a restart."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from envserver_records.errors import ConfigError
from envserver_records.packing import pack
from envserver_records.tasks import Split, Task

from ..environment import Environment
from ..tools.calling import blaming

if TYPE_CHECKING:
    from envserver_records.records import Group

T = TypeVar("T")


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one group. `index`: position of its task in the stream, from 0, or for a
    repeated task (`again_prefix`) the number of repeated tasks before it; `chosen`: why a
    curriculum chose it."""

    group_id: str
    index: int
    env: str
    split: Split
    seed: int
    task: Task
    chosen: dict[str, Any] = {}

    def group(self, **facts: Any) -> Group:
        """Returns the group that was made of it."""
        # Imports numpy, which scorer processes do without.
        from envserver_records.records import Group

        return Group(
            group_id=self.group_id,
            index=self.index,
            env=self.env,
            task_id=self.task.id,
            split=self.split,
            seed=self.seed,
            created_at=time.time(),
            **facts,
        )


def id_prefix(environment: Environment) -> str:
    config = environment.config
    return stream_prefix(environment.name, config.split, config.seed)


def stream_prefix(env: str, split: str, seed: int) -> str:
    return f"{env}-{split}-{seed}-"


def again_prefix(prefix: str) -> str:
    """ID prefix of groups re-sampled by the curriculum; `prefix` is that of the stream."""
    return f"{prefix}again-"


def group_id(prefix: str, index: int, task_id: str) -> str:
    """Returns the id of the group at `index`; the same stream gives the same ids."""
    digest = hashlib.blake2b(task_id.encode(), digest_size=4).hexdigest()
    return f"{prefix}{index:06d}-{digest}"


def request_for(
    environment: Environment, task: Task, group_id: str, index: int = 0, split: Split | None = None
) -> GroupRequest:
    config = environment.config
    return GroupRequest(
        group_id=group_id,
        index=index,
        env=environment.name,
        split=split or config.split,
        seed=config.seed,
        task=task,
    )


def group_requests(
    environment: Environment, *, repeat: bool, compared: int = 100_000
) -> Iterator[GroupRequest]:
    """Yields a group request for each task of the environment's split, lazily; warns once of equal
    ids among the first `compared` tasks."""
    config = environment.config
    prefix = id_prefix(environment)
    index = 0
    seen: dict[str, int] = {}
    for _ in itertools.count() if repeat else range(1):
        before = index
        for task in tasks_of(environment, config.split):
            if index == compared:
                seen = {}
            elif index < compared and (first := seen.setdefault(task.id, index)) != index:
                _warn_of_equal_ids(environment, task.id, first, index)
                compared = 0
            yield request_for(environment, task, group_id(prefix, index, task.id), index)
            index += 1
        compared, seen = 0, {}
        if index == before:
            raise ConfigError(
                f"Environment {environment.name!r} has no tasks in its split {config.split!r}.",
                hint="Choose another with --env.split, or another data set.",
            )


def _warn_of_equal_ids(environment: Environment, task_id: str, first: int, second: int) -> None:
    import structlog  # scorer processes do without it

    structlog.get_logger("envserver.tasks").warning(
        "tasks.equal_ids",
        environment=environment.name,
        task_id=task_id,
        positions=f"{first} and {second}",
        hint="Filters and statistics take them for one task: give each task an id of its own.",
    )


def read(requests: Iterator[GroupRequest]) -> asyncio.Future[GroupRequest | None]:
    """Returns the next request, None after the last; reads it in a thread (`aside`)."""
    return aside(lambda: next(requests, None))


def aside(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work`, which reads tasks, in a thread: reading the first may load a data set.

    Nothing joins the thread, so a stop does not wait for the data set either.
    """
    reading: concurrent.futures.Future[T] = concurrent.futures.Future()
    reading.set_running_or_notify_cancel()

    def run() -> None:
        try:
            reading.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed to the awaiting task
            reading.set_exception(error)

    here = copy_context()
    threading.Thread(target=here.run, args=(run,), name="tasks", daemon=True).start()
    return asyncio.wrap_future(reading)


def tasks_of(environment: Environment, split: Split) -> Iterator[Task]:
    with blaming(f"Environment {environment.name!r} cannot list its tasks", environment.tasks):
        for task in environment.tasks(split):
            if not isinstance(task, Task):
                raise TypeError(f"{type(task).__name__} is not a Task")
            if not (isinstance(task.id, str) and isinstance(task.public, dict)):
                raise TypeError(f"the id of task {task.id!r} must be text, its public part a dict")
            if not isinstance(task.hidden, dict):
                raise TypeError(f"the hidden part of task {task.id!r} must be a dict")
            yield task


# Scorer processes import this module: it imports no part of scoring.


def first_tasks(environment: Environment, count: int) -> list[Task]:
    made = group_requests(environment, repeat=False, compared=0)
    return [request.task for request in itertools.islice(made, count)]


def packed(task: Task) -> bytes | None:
    """Returns the task as it is sent; None if it cannot be."""
    try:
        return pack(task)
    except (TypeError, ValueError, RecursionError):  # reported by `checking.task_problems`
        return None


def digest_of(task: Task) -> str:
    data = packed(task)
    return "" if data is None else hashlib.blake2b(data, digest_size=16).hexdigest()
