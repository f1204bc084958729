"""Starts the sandboxes of one environment, if it declares them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from envserver_records.errors import ConfigError, InputError, SandboxError

from ..config import SandboxConfig
from ..environment import Environment
from ..sandbox.client import SandboxClient
from ..sandbox.service import SandboxService
from ..sandbox.watched import WatchedSandboxes


@asynccontextmanager
async def sandboxes_of(
    environment: Environment | type[Environment], config: SandboxConfig
) -> AsyncIterator[SandboxService | None]:
    """Yields a service that makes sandboxes; None if `environment` needs none.

    If `environment` is an instance, its `sandboxes` are set, for use in `tasks`.

    Raises:
        ConfigError: no allowed backend is available on this machine.
    """
    if environment.sandbox is None and environment.isolation != "sandboxed":
        yield None
        return
    async with SandboxService(config) as service:
        if isinstance(environment, Environment):
            environment.sandboxes = WatchedSandboxes(service.address)
        yield service


async def try_sandbox(sandboxes: SandboxClient, environment: Environment) -> None:
    """Makes the declared sandbox once, so that later ones start from a warm interpreter.

    Raises:
        ConfigError: it cannot be made as declared.
    """
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
