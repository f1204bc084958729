"""Reads zip archives without unpacking them to disk: lists members and reads one.

The declared sizes (number of members, total size) are checked first, and the unpacked bytes are
counted while reading, so a false declaration gains nothing.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import PurePosixPath

from .bounded import Limits

_MOST_LISTED = 500
_MOST_RATIO = 2000
"""Highest accepted compression ratio of a member."""


class BadArchive(Exception):
    """The archive is broken or too large, or lacks the member."""


def names(data: bytes) -> set[str]:
    """Returns the members' names; empty if `data` is not an archive."""
    try:
        return set(_opened(data).namelist())
    except BadArchive:
        return set()


def check(data: bytes, limits: Limits) -> zipfile.ZipFile:
    """Opens the archive. Raises BadArchive: it is broken, or its contents exceed the limits."""
    archive = _opened(data)
    members = archive.infolist()
    if len(members) > limits.members:
        raise BadArchive(f"it has {len(members):,} members; the most is {limits.members:,}.")
    size = sum(member.file_size for member in members)
    if size > limits.unpacked_bytes:
        raise BadArchive(f"unpacked it has {size:,} bytes; the most is {limits.unpacked_bytes:,}.")
    return archive


def listing(data: bytes, limits: Limits) -> str:
    """Lists the members, one per line."""
    archive = _opened(data)
    members = archive.infolist()
    lines = [f"An archive of {len(members):,} members (bytes, name):"]
    for member in members[:_MOST_LISTED]:
        marks = ""
        if member.flag_bits & 1:
            marks += " [encrypted]"
        if _is_outside(member.filename):
            marks += " [its path leads outside the archive]"
        lines.append(f"{member.file_size:>12,}  {member.filename}{marks}")
    if len(members) > _MOST_LISTED:
        lines.append(f"... and {len(members) - _MOST_LISTED:,} more")
    try:
        check(data, limits)
    except BadArchive as error:
        lines.append(f"Not all of it can be read: {error}")
    return "\n".join(lines)


def member(data: bytes, name: str, limits: Limits) -> bytes:
    """Reads one member.
    Raises BadArchive: the member is missing, too large, encrypted or broken.
    """
    archive = _opened(data)
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise BadArchive(f"there is no member {name[:200]!r} in it.") from None
    if info.is_dir():
        raise BadArchive(f"{name[:200]!r} is a folder.")
    if info.flag_bits & 1:
        raise BadArchive(f"{name[:200]!r} is encrypted.")
    most = min(limits.input_bytes, max(1 << 20, info.compress_size * _MOST_RATIO))
    if info.file_size > most:
        raise BadArchive(f"{name[:200]!r} has {info.file_size:,} bytes unpacked: that is too much.")
    try:
        with archive.open(info) as stream:
            content = stream.read(most + 1)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError) as error:
        raise BadArchive(f"{name[:200]!r} cannot be unpacked: {error}") from error
    if len(content) > most:
        raise BadArchive(f"{name[:200]!r} is larger than it says.")
    return content


def _opened(data: bytes) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise BadArchive(f"it is not a complete zip archive: {error}.") from error


def _is_outside(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in path.parts[0:1]
