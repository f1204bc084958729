"""Opens the places of stored groups: files, folders, standard input, a store, a server.

In: one source as text. Out: `RawGroup`s, each an undecoded group and its place; the reader decodes
them, so that it can skip a bad one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .stored_files import OnBytes, file_groups, files_of, lines_of
from .stored_raw import RawGroup

SERVERS = ("http://", "https://")
DATABASES = ("postgresql://", "postgres://", "sqlite://")
_SQLITE = b"SQLite format 3\0"


def open_source(source: str, on_bytes: OnBytes | None = None) -> Iterator[RawGroup]:
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
    if source.startswith(DATABASES) or is_sqlite(Path(source)):
        from .stored_database import of_database

        return of_database(source)
    if source == "-":
        return lines_of(sys.stdin.buffer, "standard input")
    return (raw for path in files_of(source) for raw in file_groups(path, on_bytes))


def size_of(sources: Sequence[str]) -> int | None:
    """Returns the bytes of all `sources` on disk; None where one has no size."""
    if any(one == "-" or one.startswith((*SERVERS, *DATABASES)) for one in sources):
        return None
    if any(is_sqlite(Path(one)) for one in sources):
        return None
    return sum(path.stat().st_size for one in sources for path in files_of(one))


def is_sqlite(path: Path) -> bool:
    """Returns whether `path` is a database of SQLite."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False
