"""Finds a task of an environment again by its id: the same settings give the same tasks.

In: the environment, its settings (including split and seed), ids. Out: tasks with their hidden
part. The environment's tasks are read only as far as needed, each of them once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from envserver_records.errors import EnvserverError, InputError, NotFoundError
from envserver_records.records import Task

from ..environment import Environment
from ..registry import find
from ..sandbox.remote.address import SandboxAddress
from ..sandbox.watched import WatchedSandboxes

MAX_TASKS_SEARCHED = 100_000
"""Maximum number of tasks searched for an id."""


class TaskFinder:
    """Finds tasks by id; reads the environment's tasks only as far as needed."""

    def __init__(
        self, env_reference: str, env_config: dict[str, Any], sandbox_address: SandboxAddress | None
    ) -> None:
        self._reference = env_reference
        self._config = env_config
        self._sandbox_address = sandbox_address
        self._lock = asyncio.Lock()
        self._seen: dict[str, Task] = {}
        self._tasks: Iterator[Task] | None = None
        self._split = ""

    async def find(self, task_id: str) -> Task:
        """Finds the task with this id.
        Raises NotFoundError: the split in the settings has none, or not among its first tasks.
        """
        async with self._lock:
            if task_id not in self._seen:
                await self._search(task_id)
        if task_id not in self._seen:
            raise self._missing(task_id)
        return self._seen[task_id]

    async def _search(self, task_id: str) -> None:
        try:
            await asyncio.to_thread(self._read_until, task_id)
        except EnvserverError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(
                f"The tasks cannot be read: {type(error).__name__}: {error}"
            ) from error

    def find_here(self, task_id: str) -> Task:
        """`find` in this thread, for a debugger: what the environment raises is raised as it is."""
        self._read_until(task_id)
        if task_id not in self._seen:
            raise self._missing(task_id)
        return self._seen[task_id]

    def _missing(self, task_id: str) -> NotFoundError:
        return NotFoundError(
            f"There is no task {task_id[:100]!r} in the split {self._split}.",
            hint=f"{len(self._seen)} tasks were searched, such as {next(iter(self._seen), '')!r}.",
        )

    def _read_until(self, task_id: str) -> None:
        if self._tasks is None:
            self._tasks = self._all_tasks()
        for task in itertools.islice(self._tasks, MAX_TASKS_SEARCHED - len(self._seen)):
            self._seen.setdefault(task.id, task)
            if task.id == task_id:
                return

    def _all_tasks(self) -> Iterator[Task]:
        environment = environment_of(self._reference, self._config)
        if self._sandbox_address is not None:
            environment.sandboxes = WatchedSandboxes(self._sandbox_address)
        self._split = environment.config.split
        return iter(environment.tasks(environment.config.split))


def environment_of(reference: str, config: dict[str, Any]) -> Environment:
    """Returns a new instance of the environment with these settings."""
    environment_class = find(reference)
    return environment_class(environment_class.Config.model_validate(config))
