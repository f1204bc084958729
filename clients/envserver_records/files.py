"""Replaces files and folders as a whole: readers see the old content or the new, never a part.

Content is written beside its place under a hidden name (`PARTIAL_FILES`) and renamed when it is
whole; an error removes it. With `sync` content and name survive a loss of power, too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from .errors import ConfigError, InputError, StoreError, StoreFull

PARTIAL_FILES: Final = ".*.partial"
"""Pattern of the files that killed processes leave behind."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_NAME_CHARACTERS: Final = 40
"""Kept of a file's name: names have at most 255 bytes."""


def replace_file(path: Path, data: bytes | str, *, sync: bool = True, mode: int = 0o666) -> None:
    """Writes `data` (text as UTF-8) to `path`. `mode` is less the process's umask."""
    with replacing(path, sync=sync, mode=mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path, *, sync: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yields a file to write to; it becomes `path` when the block ends without an error."""
    with replacing_path(path, sync=False) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        file = os.fdopen(handle, "wb")
        try:
            yield file
            file.flush()
            if sync:
                os.fsync(handle)
            file.close()
        finally:
            # After an error closing may fail again: a full disk is still full.
            with suppress(OSError):
                file.close()
    if sync:
        sync_path(path.parent)


@contextmanager
def replacing_path(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yields a path to make a file at; it becomes `path` when the block ends without an error."""
    name = path.name[:_MAX_NAME_CHARACTERS]
    partial = path.with_name(f".{name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        if sync:
            sync_path(partial)
        partial.replace(path)
        if sync:
            sync_path(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file with a JSON object. Raises InputError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.", place=str(path)) from error
    if not isinstance(found, dict):
        raise InputError(f"{path} cannot be read: it is not a JSON object.", place=str(path))
    return found


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_folder(made: Path, place: Path, aside: Path) -> None:
    """Renames the folder `made` to `place`, and what was there to `aside`, on disk on return.

    Between the two renames nothing is at `place`: a process that is killed then leaves `aside`.
    """
    if place.exists():
        place.rename(aside)
    made.rename(place)
    sync_path(place.parent)


def sync_path(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Waits until `folder` and all that is below it are on disk. Raises OSError."""
    for path in (*folder.rglob("*"), folder):
        sync_path(path)


def user_folder(variable: str, below_home: str) -> Path:
    """Returns the folder that an XDG variable names, or one below the user's home."""
    if folder := os.environ.get(variable):
        return Path(folder)
    try:
        return Path.home() / below_home
    except RuntimeError:
        hint = f"Set HOME or {variable} to a folder that this user can write."
        raise ConfigError("This user has no home directory.", hint=hint) from None


@contextmanager
def storing(path: Path, hint: str = "") -> Iterator[None]:
    """Turns errors of the file system within the block into ours."""
    try:
        yield
    except OSError as error:
        raise write_failure(path, error, hint) from error


def write_failure(path: Path | str, error: OSError, hint: str = "") -> StoreError:
    """Returns the error that says why `path` cannot be written."""
    kind = StoreFull if error.errno in _FULL else StoreError
    return kind(f"{path} cannot be written: {error.strerror or error}.", hint=hint)
