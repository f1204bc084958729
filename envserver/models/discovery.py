"""Keeps the fleet as a watched file lists engines.

A list that cannot be read, or that is being written, changes nothing, and is warned of once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
import structlog
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import ConfigError, InputError

from ..engines_config import EnginesConfig
from ..environment_config import check_url
from .fleet import Fleet
from .openai import root_of
from .replicas import Registration

Listed = list[Registration]
"""The engines that a file lists."""

_MOST_BYTES: Final = 1_000_000
_BETWEEN_READS_SECONDS: Final = 0.2

_log = structlog.get_logger("envserver.engine")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    version: int | None = None


_LINE: Final = msgspec.json.Decoder(_Line)


@contextlib.asynccontextmanager
async def discovering(fleet: Fleet, config: EnginesConfig) -> AsyncIterator[None]:
    """Reads `engines.file` again and again while the block runs; once before it begins."""
    if (file := config.file) is None:
        yield
        return
    source = _Source(fleet, file)
    await source.look()
    task = asyncio.create_task(source.run(config.poll_seconds), name="file engines")
    try:
        yield
    finally:
        await cancel_and_wait(task)


class _Source:
    """A list of engines that is looked at again and again."""

    def __init__(self, fleet: Fleet, file: Path) -> None:
        self._fleet = fleet
        self._file = file
        self._problem = ""

    async def run(self, poll_seconds: float) -> None:
        while True:
            await asyncio.sleep(poll_seconds)
            await self.look()

    async def look(self) -> None:
        """Reads the list once, and makes the fleet as it says."""
        try:
            listed = await _whole_list(self._file)
        except InputError as error:
            if str(error) != self._problem:
                _log.warning("engines_not_listed", origin="file", reason=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        self._fleet.sync("file", listed)


async def _whole_list(path: Path) -> Listed:
    """Reads the list twice and raises if the reads differ: it may be half written."""
    listed = await asyncio.to_thread(read_list, path)
    await asyncio.sleep(_BETWEEN_READS_SECONDS)
    if await asyncio.to_thread(read_list, path) != listed:
        raise InputError(f"{path} has just changed; it is read again.")
    return listed


def read_list(path: Path) -> Listed:
    """Reads a list of engines: a line is an address, or a JSON object with `url` and `version`.

    Empty lines and those that begin with # are skipped.
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
