"""Finds engines that a file or a name in DNS lists, and keeps the fleet as they say.

What holds: a list that cannot be read, or a file that is being written, changes nothing, and is
warned of once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from envserver_records.errors import ConfigError, InputError

from ..engines_config import EnginesConfig
from ..environment_config import check_url
from .fleet import Fleet
from .openai import root_of
from .replicas import Origin, Registration

Listed = list[Registration]
"""The engines that a file or a name lists."""

_MOST_BYTES: Final = 1_000_000
_BETWEEN_READS_SECONDS: Final = 0.2

_log = structlog.get_logger("envserver.engine")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    version: int | None = None


_LINE: Final = msgspec.json.Decoder(_Line)


@contextlib.asynccontextmanager
async def discovering(fleet: Fleet, config: EnginesConfig) -> AsyncIterator[None]:
    """Looks for engines as `config` says while the block runs; the first look is over when it
    begins.

    Raises:
        ConfigError: SRV records are wanted, and dnspython is not installed.
    """
    sources: dict[Origin, Callable[[], Awaitable[Listed]]] = {}
    if (file := config.file) is not None:
        sources["file"] = lambda: _whole_list(file)
    if (name := config.dns) is not None:
        if name.startswith("srv:"):
            _dnspython()
        sources["dns"] = lambda: resolved(name)
    async with contextlib.AsyncExitStack() as stack:
        for origin, look in sources.items():
            source = _Source(fleet, origin, look)
            await source.look()
            task = asyncio.create_task(source.run(config.poll_seconds), name=f"{origin} engines")
            stack.push_async_callback(_ended, task)
        yield


class _Source:
    """One list of engines that is looked at again and again."""

    def __init__(self, fleet: Fleet, origin: Origin, ask: Callable[[], Awaitable[Listed]]) -> None:
        self._fleet = fleet
        self._origin: Origin = origin
        self._ask = ask
        self._problem = ""

    async def run(self, poll_seconds: float) -> None:
        while True:
            await asyncio.sleep(poll_seconds)
            await self.look()

    async def look(self) -> None:
        """Reads the list once, and makes the fleet as it says."""
        try:
            listed = await self._ask()
        except InputError as error:
            if str(error) != self._problem:
                _log.warning("engines_not_listed", origin=self._origin, reason=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        self._fleet.sync(self._origin, listed)


async def _whole_list(path: Path) -> Listed:
    """Returns what `read_list` does, if two reads agree: a file may be read while half is written.

    Raises:
        InputError: the file has just changed, or `read_list` raised it.
    """
    listed = await asyncio.to_thread(read_list, path)
    await asyncio.sleep(_BETWEEN_READS_SECONDS)
    if await asyncio.to_thread(read_list, path) != listed:
        raise InputError(f"{path} has just changed; it is read again.")
    return listed


def read_list(path: Path) -> Listed:
    """Reads a list of engines: a line is an address, or a JSON object with `url` and `version`.

    Empty lines and those that begin with # are skipped.

    Raises:
        InputError: the file cannot be read, or a line is not of this form.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path} has over {_MOST_BYTES} bytes.")
    listed: dict[str, Registration] = {}
    for number, raw in enumerate(data.decode(errors="replace").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            entry = _LINE.decode(line) if line.startswith("{") else _Line(line)
            check_url(entry.url)
            root_of(entry.url)
        except (ConfigError, msgspec.DecodeError, ValueError) as error:
            raise InputError(f"{path}, line {number}: {error}.", place=f"line {number}") from error
        listed[entry.url] = Registration(url=entry.url, version=entry.version)
    return list(listed.values())


async def resolved(name: str) -> Listed:
    """Returns the engines at the addresses of `name` ("engines.local:8000"), or in its SRV records
    ("srv:_http._tcp.engines.local").

    Raises:
        InputError: the name cannot be resolved.
    """
    if name.startswith("srv:"):
        return await _services(name.removeprefix("srv:"))
    host, _, port = name.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InputError(f"The addresses of {host} cannot be found: {error}.") from error
    addresses = sorted({str(one[4][0]) for one in found})
    return [
        Registration(url=f"http://[{one}]:{port}" if ":" in one else f"http://{one}:{port}")
        for one in addresses
    ]


async def _services(name: str) -> Listed:
    resolver, failures = _dnspython()
    try:
        found = await resolver.resolve(name, "SRV")
    except failures.DNSException as error:
        raise InputError(f"The SRV records of {name} cannot be found: {error}.") from error
    return [Registration(url=f"http://{str(one.target).rstrip('.')}:{one.port}") for one in found]


def _dnspython() -> tuple[Any, Any]:
    """Returns the resolver and the errors of dnspython, which is not installed with envserver.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("dns.asyncresolver"), importlib.import_module(
            "dns.exception"
        )
    except ImportError:
        raise ConfigError(
            "engines.dns asks for SRV records, which need dnspython.",
            hint="pip install dnspython",
        ) from None


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
