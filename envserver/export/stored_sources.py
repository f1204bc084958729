"""Opens the places of stored groups: files, folders, standard input, a store, a server.

In: one source as text. Out: `Raw`s, each an undecoded group and its place; the reader decodes them,
so that it can skip a bad one.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import structlog
from envserver_records.errors import InputError, NotFoundError
from envserver_records.zstd import zstd

log = structlog.get_logger()

OnBytes = Callable[[int], None]

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Suffixes of the files that are read in a folder."""
SERVERS = ("http://", "https://")
DATABASES = ("postgresql://", "postgres://", "sqlite://")
_BUFFER = 1 << 20
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True)
class Raw:
    """An undecoded group; `decoded` raises InputError where it is not JSON."""

    place: str
    decoded: Callable[[], Any]


def open_source(source: str, on_bytes: OnBytes | None = None) -> Iterator[Raw]:
    """Yields the groups of one source.

    Args:
        on_bytes: called now and then with the number of further bytes read.

    Raises:
        NotFoundError: there is no such source.
        InputError: a compressed file is damaged.
        ConfigError, StoreError: a store cannot be read.
    """
    if source.startswith(SERVERS):
        from .stored_server import of_server

        return of_server(source)
    if source.startswith(DATABASES) or _is_sqlite(Path(source)):
        from .stored_database import of_database

        return of_database(source)
    if source == "-":
        return _lines(sys.stdin.buffer, "standard input")
    return (raw for path in files_of(source) for raw in _of_file(path, on_bytes))


def files_of(source: str) -> list[Path]:
    """Returns the JSONL files that a path, a folder or a glob names, sorted, without
    `.failures.jsonl`.

    Raises:
        NotFoundError: there are none.
    """
    path = Path(source)
    if path.is_file() or path.is_fifo():
        return [path]
    if path.is_dir():
        found = [one for one in sorted(path.rglob("*")) if one.name.endswith(ENDINGS)]
        found = [one for one in found if not one.name.startswith(".")]
    else:
        found = [Path(one) for one in sorted(glob.glob(source, recursive=True))]  # noqa: PTH207
    files = [one for one in found if one.is_file() and ".failures.jsonl" not in one.name]
    if not files:
        what = "no .jsonl file in it" if path.is_dir() else "no such file, folder or store"
        raise NotFoundError(f"{source}: there is {what}.")
    return files


def size_of(sources: Sequence[str]) -> int | None:
    """Returns the bytes of all `sources` on disk; None where one has no size."""
    if any(one == "-" or one.startswith((*SERVERS, *DATABASES)) for one in sources):
        return None
    if any(_is_sqlite(Path(one)) for one in sources):
        return None
    return sum(path.stat().st_size for one in sources for path in files_of(one))


@contextlib.contextmanager
def opened(path: Path, on_bytes: OnBytes | None = None) -> Iterator[IO[bytes]]:
    """Opens a file for reading, decompressed as its name says.

    Args:
        on_bytes: called with the number of bytes read, as they are on disk.

    Raises:
        InputError: it is damaged.
        NotFoundError: it cannot be opened.
    """
    try:
        file: Any = path.open("rb") if on_bytes is None else _Counted(path, on_bytes)
    except OSError as error:
        raise NotFoundError(f"{path} cannot be opened: {error.strerror}.") from error
    with file:
        if path.name.endswith(".gz"):
            file = gzip.GzipFile(fileobj=file)
        elif path.name.endswith(".zst"):
            file = zstd.ZstdFile(file)
        try:
            yield file
        except (EOFError, zlib.error, zstd.ZstdError, gzip.BadGzipFile) as error:
            raise InputError(f"{path} is damaged or cut off: {error}.", place=str(path)) from error


class _Counted(io.BufferedReader):
    """A file that reports the bytes read."""

    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(_CountedRaw(path, on_bytes), _BUFFER)


class _CountedRaw(io.FileIO):
    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(path, "rb")
        self._on_bytes = on_bytes

    def readinto(self, buffer: Any) -> int | None:
        number = super().readinto(buffer)
        self._on_bytes(number or 0)
        return number


def _of_file(path: Path, on_bytes: OnBytes | None) -> Iterator[Raw]:
    with opened(path, on_bytes) as file:
        yield from _lines(file, str(path))


def _lines(file: IO[bytes], name: str) -> Iterator[Raw]:
    for number, line in enumerate(file, 1):
        place = f"{name}, line {number}"
        if not line.endswith(b"\n") and not _is_json(line):
            log.warning("stored.torn_line", place=place, size=len(line))
            return
        if line.strip():
            yield Raw(place, lambda line=line, place=place: _decoded(line, place))  # type: ignore[misc]


def _decoded(line: bytes, place: str) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{place} is no JSON: {error}.", place=place) from error


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _is_sqlite(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False
