"""A file beside an SQLite store that holds back disk space, so that a full disk can be drained.

While the disk is full the writer refuses new groups, and what trainers do (leases, acks, runs) uses
the reserve. The disk counts as full until the reserve is held and as much again is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import structlog
from envserver_records.errors import StoreFull
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

log = structlog.get_logger(__name__)

RESERVE_BYTES: Final = 64 * 1024 * 1024
"""More than SQLite's log and the largest transaction, which must reach the file before space in the
log can be used again."""
_SHARE_OF_DISK: Final = 4


class Reserve:
    """The reserve of one store: `most_bytes`, at most a quarter of the disk."""

    def __init__(self, store: Path, most_bytes: int) -> None:
        self._path = store.with_name(store.name + ".reserve")
        disk = os.statvfs(store.parent)
        self._size = min(most_bytes, disk.f_blocks * disk.f_frsize // _SHARE_OF_DISK)
        self._held = self._path.is_file() and self._path.stat().st_size == self._size
        self.full = False
        """Whether new groups are refused."""

    def begin(self) -> None:
        self.full = not self._held
        if self.full:
            self.look_for_space()

    def use(self) -> bool:
        """Gives the space to the store; returns False if it already has it."""
        was_held, self._held = self._held, False
        if was_held:
            self._path.unlink(missing_ok=True)
            log.warning("reserve_freed", reserve=str(self._path), freed_bytes=self._size)
        return was_held

    def look_for_space(self) -> None:
        """Ends `full` if the reserve is held, or can be taken again, and as much is left."""
        if self._free_bytes() < self._needed():
            return
        if not self._held:
            try:
                self._fill()
            except OSError as error:  # a quota, or another program was faster
                self._path.unlink(missing_ok=True)
                log.info("reserve_not_made", reserve=str(self._path), error=str(error))
                return
        self._held, self.full = True, False

    def refusal(self) -> StoreFull:
        """Returns the error for new groups while the disk is full."""
        return StoreFull(
            f"The disk of the store is full ({self._free_bytes() // 1_000_000} MB are free): new "
            "groups are refused; leases and acks still work.",
            hint=f"Free space until {self._needed() // 1_000_000} MB are free, or let trainers "
            "acknowledge groups: their space is then reused.",
        )

    def _needed(self) -> int:
        return self._size if self._held else 2 * self._size

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize

    def _fill(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._size)
        finally:
            os.close(descriptor)


_KEPT_INSIDE: Final = 1024 * 1024
"""Bytes in the file that are left to leases and acks."""
_FREE_PAGES: Final = text(
    "SELECT freelist_count * page_size FROM pragma_freelist_count(), pragma_page_size()"
)


async def free_bytes_inside(connection: AsyncConnection) -> int:
    """Returns how many bytes of groups fit into pages of the file that removed groups left."""
    free = await connection.scalar(_FREE_PAGES)
    # A body of few bytes takes a page, and its rows in other tables some more.
    return int(free or 0) // 2 - _KEPT_INSIDE
