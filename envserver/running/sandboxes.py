"""Starts the sandboxes of one environment, if it declares them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from envserver_records.errors import ConfigError, InputError, SandboxError
from pydantic import BaseModel

from ..environment import Environment, Isolation
from ..folders import loaded_paths
from ..sandbox.maker import SandboxMaker
from ..sandbox.opening import WatchedSandboxes
from ..sandbox.service import SandboxService
from ..sandbox.source import SandboxSource, custom_sandboxes, machines_of
from ..settings.config import SandboxConfig

_SYSTEM = ("/usr/bin/", "/usr/sbin/", "/usr/lib", "/usr/include/", "/usr/local/bin/")


@asynccontextmanager
async def sandboxes_of(
    environment: Environment | type[Environment],
    config: SandboxConfig,
    isolation: Isolation | None = None,
) -> AsyncIterator[SandboxSource | None]:
    """Yields None if `environment` needs none. Of an instance, `sandboxes` is set, for use in
    `tasks`."""
    if environment.sandbox is None and (isolation or environment.isolation) != "sandboxed":
        yield None
        return
    async with _source(environment, config, isolation) as service:
        if isinstance(environment, Environment):
            environment.sandboxes = WatchedSandboxes(service.address)
        yield service


@asynccontextmanager
async def _source(
    environment: Environment | type[Environment],
    config: SandboxConfig,
    isolation: Isolation | None,
) -> AsyncIterator[SandboxSource]:
    if not config.remote and config.maker is None:
        async with SandboxService(config, private_paths(environment)) as service:
            yield service
        return
    if (isolation or environment.isolation) == "sandboxed":
        raise ConfigError(
            f"Agents of {environment.name!r} run in the sandbox themselves; their processes cannot "
            "be on another machine (--sandbox.remote, --sandbox.maker).",
            hint="Run `envserver join` on that machine, with its own sandboxes.",
        )
    if config.maker is not None:
        yield custom_sandboxes(config.maker)
        return
    async with machines_of(config) as machines:
        yield machines


def private_paths(environment: Environment | type[Environment]) -> list[str]:
    """Returns the paths of environments and data that are not installed: no program may see them.
    They are the folders of all environments imported by path, and the paths in the settings of
    `environment`, except for those of the system's programs and libraries."""
    named = [*loaded_paths()]
    if isinstance(environment, Environment):
        named += _paths(environment.config)
    real = {os.path.realpath(path) for path in named}
    return sorted(path for path in real if not path.startswith(_SYSTEM))


def _paths(config: BaseModel) -> Iterator[Path]:
    for _, value in config:
        if isinstance(value, Path):
            yield value
        elif isinstance(value, BaseModel):
            yield from _paths(value)


async def try_sandbox(sandboxes: SandboxMaker, environment: Environment) -> None:
    """Makes the declared sandbox once, so that later ones start from a warm interpreter."""
    if environment.sandbox is None:
        return
    try:
        async with sandboxes.open(environment.sandbox):
            return
    except (SandboxError, InputError) as error:
        raise ConfigError(
            f"The sandbox that {environment.name!r} declares cannot be made: {error.message}",
            hint=error.hint or "`envserver doctor` shows what this machine can do.",
        ) from error
