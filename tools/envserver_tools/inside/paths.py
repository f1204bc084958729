"""Paths below the workspace, after links were resolved, and the only way to open a file."""

from __future__ import annotations

import os
import stat
from typing import IO

PROBE_BYTES = 8192
"""Read to see whether a file is text."""


class Refused(Exception):
    """The request cannot be carried out; the message is for the model."""


def root() -> str:
    """The workspace."""
    return os.path.realpath(os.getcwd())


def resolve(path: str, called: str = "") -> str:
    """Returns the real path; raises Refused, naming `called`, if it is outside of the workspace."""
    top = root()
    if path == "/work" or path.startswith("/work/"):
        path = f".{path.removeprefix('/work')}"
    place = os.path.realpath(os.path.join(top, path))
    if place != top and not place.startswith(f"{top}/"):
        name = shown(called or path)
        raise Refused(f"{name} is outside of /work; only paths below /work are allowed.")
    return place


def target(path: str) -> str:
    """Returns the real path of a file to write: not a link, a directory, or a file of git's."""
    parent, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise Refused(f"{shown(path)} names a directory, not a file.")
    place = os.path.join(resolve(parent or ".", path), name)
    below = os.path.relpath(place, root())
    if any(part.lower() == ".git" for part in below.split("/")):
        raise Refused(f"{shown(path)} belongs to git; .git cannot be written.")
    try:
        mode = os.lstat(place).st_mode
    except FileNotFoundError:
        return place
    if not stat.S_ISREG(mode):
        raise Refused(f"{shown(path)} is a {kind(mode)}; only regular files can be written.")
    return place


def opened(path: str) -> IO[bytes]:
    """A regular file for reading."""
    return opened_place(resolve(path), path)


def opened_place(place: str, called: str) -> IO[bytes]:
    """As `opened`, for a resolved path. Never waits for a FIFO, never opens a device."""
    mode = os.lstat(place).st_mode
    if not stat.S_ISREG(mode):
        raise Refused(f"{shown(called)} is a {kind(mode)}, not a regular file.")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(place, flags), "rb")


def kind(mode: int) -> str:
    """The kind of a file in a word."""
    for test, word in (
        (stat.S_ISDIR, "directory"),
        (stat.S_ISLNK, "link"),
        (stat.S_ISFIFO, "FIFO"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
    ):
        if test(mode):
            return word
    return "file"


def shown(text: str) -> str:
    """A name as text: bytes that are not UTF-8 and control characters are escaped."""
    plain = os.fsencode(text) if _encodable(text) else text.encode("utf-8", "backslashreplace")
    readable = plain.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in readable)


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
