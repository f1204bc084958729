"""Sandboxes that are made on other machines, in place of this machine's `SandboxService`."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import structlog
from envserver_records.errors import (
    ConfigError,
    InputError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
)
from envserver_records.sandboxes import SandboxSpec
from envserver_records.waiting import cancel_and_wait

from ..folders import import_path
from ..sandbox_interface import Sandbox, Sandboxes
from ..settings.config import SandboxConfig
from .maker import (
    ForeignAddress,
    GuardedSandbox,
    RemoteAddress,
    SandboxAddress,
    StartedProgram,
)

if TYPE_CHECKING:
    from .service import SandboxService


def maker_class(reference: str) -> Callable[[], Sandboxes]:
    place, _, name = reference.rpartition(":")
    try:
        if place.endswith(".py"):
            (module,) = import_path(Path(place))
        else:
            module = importlib.import_module(place)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"--sandbox.maker {reference}: {error}") from error
    found: Callable[[], Sandboxes] | None = getattr(module, name, None)
    if not callable(getattr(found, "open", None)) or found is None:
        raise ConfigError(
            f"--sandbox.maker {reference}: there is no class {name!r} with a method `open`.",
            hint="docs/sandboxes.md shows one.",
        )
    return found


class CustomSandboxes:
    """A user's class as a `SandboxMaker`. It may have an async context of its own."""

    def __init__(self, reference: str) -> None:
        self._made = maker_class(reference)()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if isinstance(self._made, AbstractAsyncContextManager):
            await self._stack.enter_async_context(self._made)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[ForeignSandbox]:
        async with AsyncExitStack() as stack:
            try:
                sandbox = await stack.enter_async_context(self._made.open(spec))
            except (SandboxError, InputError):
                raise
            except Exception as error:
                raise SandboxUnavailable(f"No sandbox could be made: {_words(error)}") from error
            yield ForeignSandbox(sandbox)


async def _typed(request: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await request
    except (SandboxError, InputError):
        raise
    except Exception as error:
        raise SandboxLost(f"The sandbox was lost: {_words(error)}") from error


class ForeignSandbox(GuardedSandbox):
    """A sandbox of such a class, without interactive programs."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox, _typed)

    async def close(self) -> None:
        async def closed() -> None:  # the class may lack the method
            await self.sandbox.close()

        await _typed(closed())

    @asynccontextmanager
    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], wall_seconds: float
    ) -> AsyncIterator[StartedProgram]:
        self._cannot("run interactive programs")
        yield

    async def lead_out(self, serve: Any) -> NoReturn:
        self._cannot("reach hosts outside through the server (`egress`)")

    def _cannot(self, what: str) -> NoReturn:
        raise SandboxUnavailable(f"Sandboxes of {self.isolation} cannot {what}.")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_log = structlog.get_logger("envserver.sandbox")


@dataclass
class RemoteSource:
    """Sandboxes of other machines, or of a class, for `opening.sandboxes_at` in any process."""

    address: SandboxAddress
    private: list[str] = field(default_factory=list)
    backend = "remote"


SandboxSource: TypeAlias = "SandboxService | RemoteSource"
"""Where the sandboxes of a run come from."""


def custom_sandboxes(reference: str) -> RemoteSource:
    """See `SandboxConfig.maker`."""
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        reference = f"{Path(place).absolute()}:{name}"  # for processes with other folders
    maker_class(reference)
    return RemoteSource(ForeignAddress(reference))


@asynccontextmanager
async def machines_of(config: SandboxConfig) -> AsyncIterator[RemoteSource]:
    """Yields the sandboxes of the machines in the settings, whose load is watched meanwhile."""
    from .machines import Machines

    address = address_of(config)
    async with Machines(address) as machines:
        await machines.check()
        for machine in machines.known:
            load = machine.load
            _log.info(
                "sandbox_machine",
                machine=machine.url,
                backend=load.backend if load else "",
                sandboxes=load.sandboxes if load else 0,
                problem=machine.problem,
            )
        watching = asyncio.create_task(machines.watch(), name="sandbox-machines")
        try:
            yield RemoteSource(address)
        finally:
            await cancel_and_wait(watching)


def address_of(config: SandboxConfig) -> RemoteAddress:
    token = config.remote_token.get_secret_value()
    if config.remote_token_file is not None:
        try:
            token = config.remote_token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"--sandbox.remote_token_file cannot be read: {error.strerror}."
            ) from error
    return RemoteAddress(
        urls=config.remote_urls,
        token=token,
        ca_certs=str(config.remote_ca_certs or ""),
        certfile=str(config.remote_certfile or ""),
    )
