"""Reads stored groups from JSONL files, compressed or not."""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import structlog
from envserver_records.errors import InputError, NotFoundError
from envserver_records.zstd import zstd


@dataclass(frozen=True)
class RawGroup:
    """An undecoded group; `decoded` raises InputError where it is not JSON."""

    place: str
    decoded: Callable[[], Any]


log = structlog.get_logger()

OnBytes = Callable[[int], None]

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Suffixes of the files that are read in a folder."""
_BUFFER = 1 << 20


def files_of(source: str) -> list[Path]:
    """Returns the JSONL files that a path, a folder or a glob names, sorted, without
    `.failures.jsonl` and, in the folder of an evaluation, without what describes its tasks.
    Raises NotFoundError: there are none.
    """
    path = Path(source)
    if path.is_file() or path.is_fifo():
        return [path]
    if path.is_dir():
        found = [one for one in sorted(path.rglob("*")) if one.name.endswith(ENDINGS)]
        found = [one for one in found if not one.name.startswith(".") and not _about_tasks(one)]
    else:
        found = [Path(one) for one in sorted(glob.glob(source, recursive=True))]  # noqa: PTH207
    files = [one for one in found if one.is_file() and ".failures.jsonl" not in one.name]
    if not files:
        what = "no .jsonl file in it" if path.is_dir() else "no such file, folder or store"
        raise NotFoundError(f"{source}: there is {what}.")
    return files


def _about_tasks(path: Path) -> bool:
    """Whether it is the `tasks.jsonl` of an evaluation, beside its `groups.jsonl`."""
    name = path.name
    return name.startswith("tasks") and path.with_name(f"groups{name[5:]}").exists()


@contextlib.contextmanager
def opened(path: Path, on_bytes: OnBytes | None = None) -> Iterator[IO[bytes]]:
    """Opens a file for reading, decompressed as its name says.

    Args:
        on_bytes: called with the number of bytes read, as they are on disk.
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


def file_groups(path: Path, on_bytes: OnBytes | None) -> Iterator[RawGroup]:
    """Yields the groups of one file; see `opened`."""
    with opened(path, on_bytes) as file:
        yield from lines_of(file, str(path))


def lines_of(file: IO[bytes], name: str) -> Iterator[RawGroup]:
    """Yields the groups of an open file; skips an unfinished last line with a warning."""
    for number, line in enumerate(file, 1):
        place = f"{name}, line {number}"
        if not line.endswith(b"\n") and not is_json(line):
            log.warning("stored.torn_line", place=place, size=len(line))
            return
        if line.strip():
            yield RawGroup(place, lambda line=line, place=place: decoded(line, place))  # type: ignore[misc]


def decoded(line: bytes, place: str) -> Any:
    """Returns the value of a line. Raises InputError: it is not JSON."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{place} is not JSON: {error}.", place=place) from error


def is_json(line: bytes) -> bool:
    """Returns whether a line is whole JSON."""
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True
