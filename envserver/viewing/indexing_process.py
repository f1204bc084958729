"""Starts the process that indexes, and reports new groups to watchers; imports little."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
from envserver_records.errors import StoreError

from ..store.listing import GroupQuery
from ..store.lookups import GroupLookups
from ..trainers.live import tell_groups
from ..trainers.live_events import Feed
from .sources import Viewed

log = structlog.get_logger(__name__)

_LONGEST_LINE: Final = 1 << 20


class Request(msgspec.Struct, frozen=True):
    viewed: Viewed
    index: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the index is; bytes as they are on disk.

    `problems`: lines that are not groups; `resets`: how often the index was made anew because a
    file was replaced; `error`: why it cannot go on.
    """

    groups: int = 0
    bytes: int = 0
    total_bytes: int = 0
    done: bool = False
    problems: int = 0
    first_problems: list[str] = []
    resets: int = 0
    error: str = ""


class Indexing:
    def __init__(self, process: asyncio.subprocess.Process, index: Path) -> None:
        self.progress = Progress()
        self.index = index
        self._process = process
        self._shown = 0

    async def first(self) -> None:
        """Waits until the index can be read. Raises StoreError: it cannot be made."""
        await self._read()
        if self.progress.error:
            raise StoreError(self.progress.error)

    async def next(self) -> bool:
        """Waits for the next step; returns whether there will be more."""
        if not await self._read():
            log.warning("view.indexing_ended", error=self.progress.error)
            return False
        self._warn()
        return True

    async def _read(self) -> bool:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line:
            self.progress = msgspec.json.decode(line, type=Progress)
        elif not self.progress.error:
            self.progress = msgspec.structs.replace(self.progress, error="It ended unexpectedly.")
        return bool(line) and not self.progress.error

    def _warn(self) -> None:
        for message in self.progress.first_problems[self._shown :]:
            log.warning("view.skipped", message=message)
        self._shown = len(self.progress.first_problems)


@asynccontextmanager
async def indexing(viewed: Viewed, index: Path) -> AsyncIterator[Indexing]:
    """Runs the process while the body runs. Raises StoreError: the index cannot be made."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "envserver.viewing.indexing"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
        start_new_session=True,  # Ctrl-C is for us; its end comes with its input's
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(Request(viewed, str(index))) + b"\n")
        await process.stdin.drain()
        found = Indexing(process, index)
        yield found
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


_POLL_SECONDS: Final = 1.0


async def follow_index(feed: Feed, groups: GroupLookups, indexing: Indexing) -> None:
    """Reports the groups of each step of an index, until it is cancelled or there is no more."""
    feed.seq = indexing.progress.groups
    resets = indexing.progress.resets
    while await indexing.next():
        if indexing.progress.resets != resets:
            resets, feed.seq = indexing.progress.resets, 0
            feed.publish("resync", {"reason": "replaced"})
        try:
            await tell_groups(feed, groups, indexing.progress.groups)
        except StoreError as error:  # the next step tells of them
            log.warning("view.groups_not_told", error=str(error))


async def follow_store(feed: Feed, groups: GroupLookups) -> None:
    """Reports a store's new groups, until cancelled; feed.seq is set first."""
    while True:
        with suppress(StoreError):
            await tell_groups(feed, groups, await last_number(groups))
        await asyncio.sleep(_POLL_SECONDS)
        await feed.watched.wait()


async def last_number(groups: GroupLookups) -> int:
    page = await groups.list_groups(GroupQuery(order="newest"), "", 1)
    return page.groups[0].row.seq if page.groups else 0
