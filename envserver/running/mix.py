"""Several environments in one run: each with settings and a share of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from envserver_records.errors import EnvserverError

from ..config import MixSettings
from ..environment import Environment
from ..rollouts.mixing import Share
from ..rollouts.scheduler import Scheduler
from .spec import RunSpec

M = TypeVar("M", bound=MixSettings)


@dataclass(frozen=True)
class Member(Generic[M]):
    """One environment of a mix, made."""

    spec: RunSpec[M]
    environment: Environment
    share: Share


def alone(spec: RunSpec[M]) -> Member[M]:
    """The only environment of a run.

    Raises:
        ConfigError: it cannot be made with its settings.
    """
    environment = spec.make_environment()
    return Member(spec, environment, Share(environment.name))


class Several:
    """Schedulers of a mix as one."""

    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self._schedulers = dict(schedulers)
        self.failed: dict[str, EnvserverError] = {}
        """Which ended by a failure, while the others went on."""

    @property
    def open_groups(self) -> int:
        """Groups that are being made now."""
        return sum(one.open_groups for one in self._schedulers.values())

    @property
    def drained(self) -> bool:
        """Whether `drain` was called."""
        return any(one.drained for one in self._schedulers.values())

    def cut_off(self) -> dict[str, int]:
        """Groups of each that were cancelled because the run was."""
        return {name: one.cut_off for name, one in self._schedulers.items()}

    def delivered(self) -> dict[str, int]:
        """Groups that each delivered in this run."""
        return {name: one.delivered for name, one in self._schedulers.items()}

    def drain(self) -> None:
        """No environment begins a further group."""
        for one in self._schedulers.values():
            one.drain()

    async def run(self, say: Callable[[str], object]) -> None:
        """Runs all to their ends.

        Raises:
            EnvserverError: of the first that failed, when all have ended.
        """
        async with asyncio.TaskGroup() as tasks:
            for name, one in self._schedulers.items():
                tasks.create_task(self._one(name, one.run(), say))
        if self.failed:
            name, error = next(iter(self.failed.items()))
            if len(self._schedulers) > 1:
                error.message = f"{name}: {error.message}"
            raise error

    async def _one(
        self, name: str, work: Coroutine[Any, Any, None], say: Callable[[str], object]
    ) -> None:
        try:
            await work
        except EnvserverError as error:
            self.failed[name] = error
            if len(self._schedulers) > 1:
                say(f"{name} has ended: {error.message}")
