"""The identity of a runner: a name and a secret, in a file locked by its process.

A restarted runner gets the same name, however it ended, and continues its own stream of groups.
Two runners in one folder at the same time get different names.
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
    """The name and the secret `instance`, known only to this runner and the server."""

    name: str
    instance: str


def default_name(environment: str) -> str:
    """Returns a name such as `math@host`."""
    return f"{environment}@{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())[:64]}"


@contextlib.contextmanager
def held_identity(folder: Path, *, name: str | None, default: str) -> Iterator[Identity]:
    """Holds the identity of this process while the context is open.

    Args:
        folder: folder of the identity files.
        name: chosen by the user; None: `default`, with -2, -3, ... appended if another process
            has that name.
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
    """Returns the secret in the file; writes a new one if it is missing or incomplete."""
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(os.pread(file, 4096, 0), type=dict[str, str])
        if len(found.get("instance", "")) >= 16:
            return found["instance"]
    instance = secrets.token_urlsafe(24)
    os.ftruncate(file, 0)
    os.pwrite(file, msgspec.json.encode({"instance": instance}), 0)
    os.fsync(file)
    return instance
