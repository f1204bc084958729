"""Builds the index in a process of its own, and goes on while the files grow.

    python -m envserver.viewing.indexing

In: a `Request` as the first line of standard input, which stays open as long as there is a viewer.
Out: the index, and after each step a `Progress` as a line on standard output. One process at a time
writes an index; another waits for its turn and reports what the first one did.
"""

from __future__ import annotations

import fcntl
import os
import select
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
from envserver_records.errors import EnvserverError, NotFoundError, StoreError

from .index import VERSION, FileState, Index, may_continue, state_of
from .indexing_process import Progress, Request
from .scanning import Documents, FileScan
from .sources import Viewed, ViewedFile

_COMMIT_SECONDS: Final = 0.3
_POLL_SECONDS: Final = 0.5


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
    try:
        with _locked(Path(request.index)):
            Indexer(request.viewed, Path(request.index), _tell).run()
    except (EnvserverError, OSError, sqlite3.Error) as error:
        _tell(Progress(error=_reason(error, request.index)))
        sys.exit(1)


def _reason(error: Exception, index: str) -> str:
    if isinstance(error, sqlite3.Error):
        return f"The index {index} cannot be written: {error}."
    return str(error)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process writes the index; ends this one if no viewer is left."""
    # Never closed before the end: SQLite's locks would go with it.
    with open(path, "ab", opener=_for_the_user) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _tell_of_other(path)
                if _is_over(_POLL_SECONDS):
                    return
        yield


def _for_the_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _tell_of_other(path: Path) -> None:
    try:
        with sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True, timeout=5) as sql:
            (version,) = sql.execute("PRAGMA user_version").fetchone()
            (groups,) = sql.execute("SELECT count(*) FROM groups").fetchone()
            states = [row[0] for row in sql.execute("SELECT state FROM files")]
        sql.close()
    except sqlite3.Error:
        return  # it is just being made
    if version != VERSION:
        raise StoreError(
            f"{path} is in use by an envserver of another version.", hint="End that one first."
        )
    read = [msgspec.json.decode(state, type=FileState) for state in states]
    total = sum(max(0, file.size) for file in read)
    known = sum(min(file.offset, max(0, file.size)) for file in read)
    _tell(Progress(groups=groups, bytes=known, total_bytes=total, done=known == total))


class Indexer:
    def __init__(self, viewed: Viewed, path: Path, on_progress: Callable[[Progress], None]) -> None:
        self._viewed = viewed
        self._on_progress = on_progress
        self._index = Index(path)
        self._resets = 0
        self._seen: dict[str, tuple[int, int, int]] = {}
        """Inode, size and time of each file when it was last read to its end."""
        self._read: dict[str, int] = {}
        self._has_begun = False
        self._total = 0
        self._committed = 0.0

    def run(self) -> None:
        self.read_new()
        self._tell(done=True)
        while True:
            started = time.monotonic()
            with suppress(NotFoundError):  # what was removed meanwhile stays to be seen
                if self.read_new():
                    self._tell(done=True)
            # Looking at ten thousand files takes a while: it takes a tenth of the time at most.
            if _is_over(max(_POLL_SECONDS, 9 * (time.monotonic() - started))):
                self.close()
                return

    def close(self) -> None:
        self._index.close()

    def read_new(self) -> bool:
        """Indexes everything that is new; returns whether there was anything."""
        files = self._viewed.files()
        known = self._index.files()
        if self._were_replaced(files, known):
            self._index.clear()
            self._seen.clear()
            self._read.clear()
            self._resets += 1
            known = {}
        stats = {file.path: _stat(file.path) for file in files}
        self._total = sum(size for _, size, _ in stats.values())
        if not self._has_begun:
            self._has_begun = True
            self._read = {path: min(at.offset, max(0, at.size)) for path, (_, at) in known.items()}
            self._tell()  # what is known from before can be shown
        new = [file for file in files if self._seen.get(file.path) != stats[file.path]]
        documents = Documents()
        run = ""
        for viewed in new:
            if viewed.run != run:
                self._add(_number(known, viewed), run, documents)
                run = viewed.run
            self._read_file(viewed, known, documents)
            self._seen[viewed.path] = stats[viewed.path]
        if new:
            self._add(_number(known, new[-1]), run, documents)
            self._index.commit()
        return bool(new)

    def _were_replaced(
        self, files: list[ViewedFile], known: dict[str, tuple[int, FileState]]
    ) -> bool:
        paths = {file.path for file in files}
        return any(
            path not in paths
            or (self._seen.get(path) != _stat(path) and not may_continue(Path(path), state))
            for path, (_, state) in known.items()
        )

    def _read_file(
        self, file: ViewedFile, known: dict[str, tuple[int, FileState]], documents: Documents
    ) -> None:
        path = Path(file.path)
        number = _number(known, file)
        before = known.get(file.path, (number, FileState()))[1]
        known[file.path] = (number, before)
        scan = FileScan(path, before.offset, before.line)
        if before.offset and (scan.is_compressed or scan.is_document):
            return  # it was read to its end, and does not grow
        names = (file.run, file.part, file.baseline)
        for found in scan.found(documents):
            self._index.add(number, file.run, found)
            self._read[file.path] = scan.disk_bytes
            is_due = time.monotonic() - self._committed > _COMMIT_SECONDS
            if is_due and not documents.are_waiting:
                # Half a compressed file cannot be gone on with: then the index is made anew.
                state = FileState() if scan.is_compressed else _state(scan)
                self._index.put_file(number, file.path, names, state)
                self._index.commit()
                self._tell()
        if not scan.is_document:
            self._add(number, file.run, documents)
        self._read[file.path] = scan.disk_bytes
        self._index.put_file(number, file.path, names, _state(scan))

    def _add(self, number: int, run: str, documents: Documents) -> None:
        for found in documents.flush():
            self._index.add(number, run, found)

    def progress(self, *, done: bool = False) -> Progress:
        count, first = self._index.problems()
        return Progress(
            groups=self._index.next_seq - 1,
            bytes=self._total if done else sum(self._read.values()),
            total_bytes=self._total,
            done=done,
            problems=count,
            first_problems=first,
            resets=self._resets,
        )

    def _tell(self, *, done: bool = False) -> None:
        self._committed = time.monotonic()
        self._on_progress(self.progress(done=done))


def _number(known: dict[str, tuple[int, FileState]], file: ViewedFile) -> int:
    return known[file.path][0] if file.path in known else len(known)


def _state(scan: FileScan) -> FileState:
    try:
        return state_of(scan.path, scan.offset, scan.line)
    except OSError:
        return FileState()


def _stat(path: str) -> tuple[int, int, int]:
    try:
        facts = Path(path).stat()
    except OSError:
        return 0, 0, 0
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _tell(progress: Progress) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(progress) + b"\n")
    sys.stdout.buffer.flush()


def _is_over(seconds: float) -> bool:
    """Waits; returns whether no viewer is left."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready)


if __name__ == "__main__":
    main()
