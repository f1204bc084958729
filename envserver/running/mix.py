"""The environments of a run: one with its settings, or several, each with its share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from envserver_records.errors import ConfigError, EnvserverError

from ..environment import Environment
from ..rollouts.mixing import Share
from ..rollouts.scheduler import Scheduler
from ..settings.config import EnvironmentSettings, MixSettings

S = TypeVar("S", bound=EnvironmentSettings)


@dataclass(frozen=True)
class RunSpec(Generic[S]):
    """One environment to run, with all settings of the run.

    Args:
        settings: checked; `settings.env` is an instance of the environment's own Config.
        reference: the environment as the user named it: a name, or a path to a file.
        environment_class: the class that `reference` names.
    """

    settings: S
    reference: str
    environment_class: type[Environment]

    def make_environment(self) -> Environment:
        """Makes the environment with its settings."""
        from ..rollouts.roles import roles_of
        from ..tools.bugs import place_of

        try:
            environment = self.environment_class(self.settings.env)
            roles_of(environment)
            return environment
        except EnvserverError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"Environment {self.reference!r} cannot be made: {type(error).__name__}: {error} "
                f"{place_of(error)}"
            ) from error


M = TypeVar("M", bound=MixSettings)


@dataclass(frozen=True)
class Member(Generic[M]):
    """One environment of a mix, instantiated."""

    spec: RunSpec[M]
    environment: Environment
    share: Share


def alone(spec: RunSpec[M]) -> Member[M]:
    """Makes the only environment of a run.
    Raises ConfigError: it cannot be made with its settings.
    """
    environment = spec.make_environment()
    return Member(spec, environment, Share(environment.name))


def share_total(listed: Sequence[M], own: Sequence[bool]) -> list[M]:
    """Reads `env.total_steps` of a mix as the groups of all environments together.

    Args:
        listed: the settings of each environment.
        own: whether an environment has a number of steps for itself alone; it keeps that.

    Returns:
        the settings, with the number in `total_groups`; a smaller `total_groups` stays.
    """
    totals = {
        total
        for one, its_own in zip(listed, own, strict=True)
        for total in (one.total_groups, None if its_own else one.env.total_steps)
        if total is not None
    }
    total = min(totals, default=None)
    return [
        one.model_copy(
            update={
                "total_groups": total,
                "env": one.env.model_copy(
                    update={"total_steps": one.env.total_steps if its_own else None}
                ),
            }
        )
        for one, its_own in zip(listed, own, strict=True)
    ]


class Several:
    """Runs the schedulers of a mix as one."""

    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self._schedulers = dict(schedulers)
        self.failed: dict[str, EnvserverError] = {}
        """Errors of the environments that failed while the others went on, by name."""

    @property
    def open_groups(self) -> int:
        """Number of groups that are being made now."""
        return sum(one.open_groups for one in self._schedulers.values())

    @property
    def drained(self) -> bool:
        """Whether `drain` was called."""
        return any(one.drained for one in self._schedulers.values())

    def cut_off(self) -> dict[str, int]:
        """Returns the number of groups cancelled with the run, by environment."""
        return {name: one.cut_off for name, one in self._schedulers.items()}

    def delivered(self) -> dict[str, int]:
        """Returns the number of groups delivered in this run, by environment."""
        return {name: one.delivered for name, one in self._schedulers.items()}

    def drain(self) -> None:
        """Lets no environment begin another group."""
        for one in self._schedulers.values():
            one.drain()

    async def run(self, say: Callable[[str], object]) -> None:
        """Runs all schedulers to their ends.
        Raises EnvserverError: the error of the first that failed, after all have ended.
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
