"""Who a joiner is: a name and a secret, kept in a file that no other process uses meanwhile.

A joiner that is started again, however it ended, takes the same name, and so goes on with its own
stream of groups. Two at a time in one folder get different names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
from envserver_records.errors import ConfigError

_MOST_NAMES = 256


class Identity(msgspec.Struct, frozen=True):
    """`instance` is known to this joiner and the server only."""

    name: str
    instance: str


def default_name(environment: str) -> str:
    """`math@host`."""
    return f"{environment}@{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())[:64]}"


@contextlib.contextmanager
def held_identity(folder: Path, *, name: str | None, default: str) -> Iterator[Identity]:
    """The identity of this process, for as long as it is within.

    Args:
        folder: where the files are kept.
        name: as a person chose it; None: `default`, or where another process has that, with -2,
            -3, ... behind it.

    Raises:
        ConfigError: another process has that name, or the folder cannot be written.
    """
    names = [name] if name else [default, *(f"{default}-{n}" for n in range(2, _MOST_NAMES))]
    for one in names:
        file = _opened(folder / f"{one}.json")
        try:
            if _locks(file):
                yield Identity(one, _instance(file))
                return
        finally:
            os.close(file)
    raise ConfigError(
        f"Another process in {folder} is {names[0]!r} now.",
        hint="Give this one another with --name.",
    )


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened: {error.strerror}.", hint="Choose a folder: --joined_folder."
        ) from error


def _locks(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _instance(file: int) -> str:
    """The secret in the file; a new one where it holds none, or a torn one."""
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(os.pread(file, 4096, 0), type=dict[str, str])
        if len(found.get("instance", "")) >= 16:
            return found["instance"]
    instance = secrets.token_urlsafe(24)
    os.ftruncate(file, 0)
    os.pwrite(file, msgspec.json.encode({"instance": instance}), 0)
    os.fsync(file)
    return instance
