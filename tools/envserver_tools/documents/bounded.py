"""Runs a function in a forked process with limits on time, memory and output.

A parser of untrusted files can be made to loop, to exhaust memory or to crash; here that ends only
the forked process and becomes an error message. The function sees the caller's memory.
"""

from __future__ import annotations

import io
import json
import os
import resource
import select
import signal
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn


@dataclass(frozen=True)
class Limits:
    """Limits for reading one document.

    Args:
        seconds: wall time, and also CPU time.
        memory_mb: memory in addition to what the process already uses.
        input_bytes: size of the file.
        unpacked_bytes, members: for archives, including zipped office documents.
        characters: length of the text; the rest is dropped, with a note.
    """

    seconds: float = 20.0
    memory_mb: int = 768
    input_bytes: int = 64 << 20
    unpacked_bytes: int = 256 << 20
    members: int = 10_000
    characters: int = 2_000_000


class PassedLimits(Exception):
    """The function exceeded a limit, or its process died."""


def bounded(work: Callable[[], Any], limits: Limits) -> Any:
    """Runs `work`; returns `{"value": ...}`, JSON-like, or `{"error": [class name, message]}`."""
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        # The child runs nothing that needs a lock which another thread may hold for long; if it
        # does, the time limit ends it.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _work_and_end(work, limits, sending)
    os.close(sending)
    try:
        said = _read(receiving, limits)
    finally:
        os.close(receiving)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not said:
        raise PassedLimits(_death(status))
    try:
        return json.loads(said)
    except ValueError as error:
        raise PassedLimits("it could not be read to its end") from error


def _read(receiving: int, limits: Limits) -> bytes:
    most = limits.characters * 12 + 4096
    until = time.monotonic() + limits.seconds
    parts: list[bytes] = []
    size = 0
    while size <= most:
        left = until - time.monotonic()
        if left <= 0 or not select.select([receiving], [], [], left)[0]:
            raise PassedLimits(f"reading it takes longer than {limits.seconds:g} seconds")
        part = os.read(receiving, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise PassedLimits("its text is too long")


def _death(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return "reading it takes too much processor time"
    return f"the process that read it died (status {code})"


def _work_and_end(work: Callable[[], Any], limits: Limits, sending: int) -> NoReturn:
    try:
        os.dup2(sending, 3)
        os.closerange(4, 1 << 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        _bound(limits)
        try:
            said = json.dumps({"value": work()})
        except MemoryError:
            said = json.dumps({"error": ["MemoryError", f"it needs over {limits.memory_mb} MB"]})
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side judges it
            said = json.dumps({"error": [type(error).__name__, str(error)[:500]]})
        data = memoryview(said.encode())
        while data:
            data = data[os.write(3, data) :]
    finally:
        os._exit(0)


def _bound(limits: Limits) -> None:
    seconds = int(limits.seconds) + 1
    _lower(resource.RLIMIT_CPU, seconds)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    pages = Path("/proc/self/statm")
    if pages.exists():
        now = int(pages.read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, now + (limits.memory_mb << 20))


def _lower(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


# The declared sizes (number of members, total size) are checked first, and the unpacked bytes are
# counted while reading, so a false declaration gains nothing.

_MOST_LISTED = 500
_MOST_RATIO = 2000
"""Highest accepted compression ratio of a member."""


class BadArchive(Exception): ...


def names(data: bytes) -> set[str]:
    """Empty if `data` is not an archive."""
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
