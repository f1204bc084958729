"""The files of a store in SQLite: one process at a time, and whether they are still there.

SQLite goes on writing into a file that has been removed or replaced, and everything would be lost
with it; so the files are looked at around every commit.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envserver_records.errors import ConfigError, StoreLost

from .failures import already_open


def make_folder(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"The store {path} is a folder.", hint="Name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"The folder of the store {path} cannot be made ({error}).") from error


class Files:
    """SQLite's files, as they were when this process first saw them."""

    def __init__(self, path: Path, lock_path: Path) -> None:
        self._log = path.with_name(path.name + "-wal")
        self._wanted = (path, self._log, lock_path)
        self._seen: dict[Path, tuple[int, int]] = {}

    def begin(self) -> None:
        """A connection is made: the log may be a new one, when no other was open."""
        self._seen.pop(self._log, None)

    def check(self) -> None:
        """Raises StoreLost: one that was there is not, or is another."""
        for path in self._wanted:
            try:
                found = path.stat()
            except FileNotFoundError:
                if path not in self._seen:
                    continue
                raise _lost(path, "has been removed") from None
            identity = (found.st_dev, found.st_ino)
            if self._seen.setdefault(path, identity) != identity:
                raise _lost(path, "has been replaced")


def _lost(path: Path, what: str) -> StoreLost:
    return StoreLost(
        f"The store's file {path} {what} while it was open.",
        hint="Put the files back as they were, and begin again.",
    )


@contextmanager
def locked_file(path: Path) -> Iterator[Files]:
    """Holds the lock file beside `path`. It is left behind: removing it would let two hold it."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError as error:
        raise ConfigError(f"The store {path} cannot be opened for writing ({error}).") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise already_open(str(path), holder or "unknown") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
        yield Files(path, lock_path)
    finally:
        os.close(descriptor)
