"""Runs a function in a forked process that is bounded in time, memory and what it says.

What parses files of strangers can be made to loop, to eat memory or to crash; here that ends the
process that did it and becomes a sentence. The function sees all that the caller had in memory.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Limits:
    """What reading one document may use.

    Args:
        seconds: of wall time; of processor time, too.
        memory_mb: beyond what the process has anyway.
        input_bytes: of the file as it is.
        unpacked_bytes, members: of an archive, also of one that is an office document.
        characters: of text; the rest is left out, and that is said.
    """

    seconds: float = 20.0
    memory_mb: int = 768
    input_bytes: int = 64 << 20
    unpacked_bytes: int = 256 << 20
    members: int = 10_000
    characters: int = 2_000_000


class PassedLimits(Exception):
    """The function used more than it may, or its process died."""


def bounded(work: Callable[[], Any], limits: Limits) -> Any:
    """What `work` returns (something JSON-like), or the exception that it raised as its text.

    Returns:
        `{"value": ...}` or `{"error": [class name, message]}`.

    Raises:
        PassedLimits: it used more than it may; says what.
    """
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        # The child runs nothing that another thread of ours could hold a lock of for long; if it
        # does, its time ends it.
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
