"""Sandboxes that are made on other machines, in place of this machine's `SandboxService`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import structlog
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import ConfigError

from ..settings.config import SandboxConfig
from .foreign import maker_class
from .remote.address import ForeignAddress, RemoteAddress, SandboxAddress

_log = structlog.get_logger("envserver.sandbox")


class SandboxSource(Protocol):
    """Where the sandboxes of a run come from: a `SandboxService`, or `RemoteSource`."""

    @property
    def backend(self) -> str:
        """The backend on this machine; "remote": they are made on other machines."""

    @property
    def address(self) -> SandboxAddress:
        """Is given to `maker.sandboxes_at`, in any process of this machine."""

    @property
    def private(self) -> list[str]:
        """Paths of this machine that programs never see."""


class RemoteSource:
    """See `SandboxSource`."""

    backend = "remote"

    def __init__(self, address: SandboxAddress) -> None:
        self.address = address
        self.private: list[str] = []


def foreign(reference: str) -> RemoteSource:
    """Returns the sandboxes of a class; see `SandboxConfig.maker`.
    Raises ConfigError: there is no such class.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        reference = f"{Path(place).absolute()}:{name}"  # for processes with other folders
    maker_class(reference)
    return RemoteSource(ForeignAddress(reference))


@asynccontextmanager
async def machines_of(config: SandboxConfig) -> AsyncIterator[RemoteSource]:
    """Yields the sandboxes of the machines in the settings, whose load is watched meanwhile.
    Raises ConfigError: none of them answers, or a file cannot be read.
    """
    from .remote.machines import Machines

    address = address_of(config)
    async with Machines(address) as machines:
        await machines.check()
        for one in machines.known:
            load = one.load
            _log.info(
                "sandbox_machine",
                machine=one.url,
                backend=load.backend if load else "",
                sandboxes=load.sandboxes if load else 0,
                problem=one.problem,
            )
        watching = asyncio.create_task(machines.watch(), name="sandbox-machines")
        try:
            yield RemoteSource(address)
        finally:
            await cancel_and_wait(watching)


def address_of(config: SandboxConfig) -> RemoteAddress:
    """Returns the address of the machines in the settings.
    Raises ConfigError: the file of the token cannot be read.
    """
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
