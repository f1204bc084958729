"""The stream of tasks of a run: endless or one pass, the same again after a restart."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from envserver_records.errors import ConfigError, EnvserverError
from envserver_records.records import Split, Task

from ..environment import Environment

T = TypeVar("T")


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One group to be made: the task at position `index` of the stream (from 0); of one that came
    again, see `again_prefix`, how many had come again before."""

    group_id: str
    index: int
    env: str
    split: Split
    seed: int
    task: Task


def id_prefix(environment: Environment) -> str:
    """With which the ids of all groups of this environment's split and seed begin."""
    config = environment.config
    return stream_prefix(environment.name, config.split, config.seed)


def stream_prefix(env: str, split: str, seed: int) -> str:
    """With which the ids of all groups of one stream begin."""
    return f"{env}-{split}-{seed}-"


def again_prefix(prefix: str) -> str:
    """With which the ids of those groups of a stream begin whose tasks came again, out of the
    environment's order; `prefix` is that of the stream."""
    return f"{prefix}again-"


def group_id(prefix: str, index: int, task_id: str) -> str:
    """Stable id of the group at `index`: the same stream makes the same ids."""
    digest = hashlib.blake2b(task_id.encode(), digest_size=4).hexdigest()
    return f"{prefix}{index:06d}-{digest}"


def group_requests(environment: Environment, *, repeat: bool) -> Iterator[GroupRequest]:
    """The tasks of the environment's split as groups to be made, lazily.

    Args:
        repeat: begin again after the last task, for as long as anyone asks.

    Raises:
        ConfigError: the split has no task, `tasks` raised, or gave something that is no Task.
    """
    config = environment.config
    prefix = id_prefix(environment)
    index = 0
    for _ in itertools.count() if repeat else range(1):
        before = index
        for task in tasks_of(environment, config.split):
            yield GroupRequest(
                group_id=group_id(prefix, index, task.id),
                index=index,
                env=environment.name,
                split=config.split,
                seed=config.seed,
                task=task,
            )
            index += 1
        if index == before:
            raise ConfigError(
                f"Environment {environment.name!r} has no tasks in its split {config.split!r}.",
                hint="Choose another with --env.split, or another data set.",
            )


def read(requests: Iterator[GroupRequest]) -> asyncio.Future[GroupRequest | None]:
    """The next of `requests`, None behind the last; read `aside`."""
    return aside(lambda: next(requests, None))


def aside(work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work`, which reads tasks, returns.

    It is done in a thread, for the first task may come with a data set to be loaded; and in one
    that nobody waits for, so that a stop does not wait for the data set.
    """
    reading: concurrent.futures.Future[T] = concurrent.futures.Future()
    reading.set_running_or_notify_cancel()

    def run() -> None:
        try:
            reading.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it goes to whoever awaits
            reading.set_exception(error)

    threading.Thread(target=run, name="tasks", daemon=True).start()
    return asyncio.wrap_future(reading)


def tasks_of(environment: Environment, split: Split) -> Iterator[Task]:
    """The tasks of a split, lazily.

    Raises:
        ConfigError: `tasks` raised, or gave something that is no Task.
    """
    try:
        for task in environment.tasks(split):
            if not isinstance(task, Task):
                raise TypeError(f"{type(task).__name__} is no Task")
            if not (isinstance(task.id, str) and isinstance(task.public, dict)):
                raise TypeError(f"the id of task {task.id!r} must be text, its public part a dict")
            yield task
    except EnvserverError:
        raise
    except Exception as error:
        raise ConfigError(
            f"Environment {environment.name!r} cannot give its tasks: "
            f"{type(error).__name__}: {error}.",
            hint="--debug shows where.",
        ) from error
