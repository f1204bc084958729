"""Files that lines are appended to: locked, synced, replaced by a rename, cut after a torn write.

In: lines. Out: a file of whole lines. What always holds: each append is whole or undone, and an old
file is replaced only when the first line of the new one is on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import IO

from envserver_records.errors import ConfigError, StoreError
from envserver_records.files import replacing_path, write_failure
from envserver_records.records import chained, digest_after


class OutputFile:
    """A locked file that lines are appended to; the first line may replace what another run left.

    The old content stays until then, so a run that fails before its first group loses nothing.
    """

    def __init__(self, path: Path, file: IO[bytes], *, replaces: bool) -> None:
        """
        Args:
            file: `path`, opened to append and locked; the caller closes it.
            replaces: the first line replaces the file by a rename.
        """
        self._path = path.resolve()
        self._file = file
        self._replaces = replaces
        self._previous = "" if replaces else digest_after_last_line(file)
        self._opened = contextlib.ExitStack()

    def append(self, line: bytes) -> None:
        """Appends `line`, chained to the line before it (see `seals`), and syncs it to disk.
        Raises StoreError: it cannot be written; the file is unchanged.
        """
        line = chained(line, self._previous)
        self._append(line)
        self._previous = digest_after(line)

    def _append(self, line: bytes) -> None:
        if not self._replaces:
            append_durably(self._file, line)
            return
        # The old file stays open: its lock refuses processes that opened it before the rename.
        with contextlib.ExitStack() as stack:
            try:
                with replacing_path(self._path) as partial:
                    file = stack.enter_context(open_appending(partial))
                    lock(file, self._path)
                    append_durably(file, line)
            except OSError as error:
                raise write_failure(str(self._path), error, "The old file is unchanged.") from error
            self._opened = stack.pop_all()
        self._file, self._replaces = file, False

    def close(self) -> None:
        """Closes the file that replaced the old one."""
        self._opened.close()


def append_durably(file: IO[bytes], data: bytes) -> None:
    """Appends all of `data` to an unbuffered `file` and syncs it, or nothing."""
    start = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fdatasync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):  # the original failure is the one to tell
            file.truncate(start)
        hint = "Nothing of this group was kept. Free space and run again with --resume."
        raise write_failure(file.name, error, hint) from error


def open_appending(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", 0)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError(
            f"{path} is a device or a pipe: what was written cannot be read again.",
            hint="Name a file.",
        )
    return file


def lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"Another process is writing {path}.") from error


def digest_after_last_line(file: IO[bytes]) -> str:
    """Returns the `previous` of a line that is appended to `file`, which holds whole lines."""
    end = file.seek(0, os.SEEK_END)
    pieces: list[bytes] = []
    start = end
    while start:
        size = min(start, 65536)
        start -= size
        file.seek(start)
        piece = file.read(size)
        body = piece[:-1] if not pieces else piece  # the newline that ends the file
        at = body.rfind(b"\n")
        pieces.append(piece[at + 1 :])
        if at >= 0:
            break
    return digest_after(b"".join(reversed(pieces))) if end else ""


def cut_torn_line(file: IO[bytes]) -> int:
    """Removes what follows the last newline; returns the number of bytes removed."""
    size = file.seek(0, os.SEEK_END)
    end = size
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            end = start + at + 1
            break
        end = start
    if end < size:
        file.truncate(end)
        os.fsync(file.fileno())
    return size - end
