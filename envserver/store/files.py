"""The files of a SQLite store: locks them for one process, and detects when they are removed.

SQLite goes on writing to a file that was removed or replaced, and those writes would be lost. So
the files are checked around every commit.
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
    """Makes the folder of `path`. Raises ConfigError if it cannot be made or `path` is a folder."""
    if path.is_dir():
        raise ConfigError(f"The store {path} is a folder.", hint="Give the path of a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"The folder of the store {path} cannot be created ({error}).") from error


class Files:
    """The identities of SQLite's files, as this process first saw them."""

    def __init__(self, path: Path, lock_path: Path) -> None:
        self._log = path.with_name(path.name + "-wal")
        self._wanted = (path, self._log, lock_path)
        self._seen: dict[Path, tuple[int, int]] = {}

    def begin(self) -> None:
        """Call for each new connection: the log file may be a new one if no other connection was
        open.
        """
        self._seen.pop(self._log, None)

    def check(self) -> None:
        """Raises StoreLost if a file was removed or replaced."""
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
        hint="Put the files back as they were, and start again.",
    )


@contextmanager
def locked_file(path: Path) -> Iterator[Files]:
    """Locks the file PATH.lock. It is left behind: removing it would let two processes lock it."""
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
