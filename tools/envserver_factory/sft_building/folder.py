"""A folder of data that is complete or absent.

It is written beside its place, synced, and renamed. A folder of an earlier run of the same command
is replaced at the end; any other non-empty folder is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError
from envserver_records.files import replace_folder, storing


@contextlib.contextmanager
def new_folder(place: Path, *, mark: str) -> Iterator[Path]:
    """Yields a folder that becomes `place` when the block succeeds, and is removed otherwise.

    Args:
        mark: a file that every such folder has (`SUMMARY.json`); a folder with it may be replaced.
    """
    _refuse(place, mark)
    place = place.absolute()
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    with storing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
    try:
        yield beside
        with storing(place):
            _put(beside, place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_lines(path: Path, lines: Iterable[bytes]) -> str:
    """Writes a file to disk, and its parent folders; returns the sha256 of its bytes, in
    hexadecimal."""
    digest = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for line in lines:
            digest.update(line)
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Writes JSON for people: two spaces, keys in order, no newline at the end."""
    write_lines(path, [json.dumps(summary, indent=2).encode()])


def _refuse(place: Path, mark: str) -> None:
    if place.is_dir():
        if any(place.iterdir()) and not (place / mark).is_file():
            raise ConfigError(
                f"{place} holds other files: it has no {mark}.", hint="Name a new or empty folder."
            )
    elif place.exists() or place.is_symlink():
        raise ConfigError(f"{place} is not a folder.")


def _put(beside: Path, place: Path) -> None:
    """Renames; the old folder is removed only once the new one is in place."""
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    replace_folder(beside, place, old)
    shutil.rmtree(old, ignore_errors=True)
