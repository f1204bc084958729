"""Samples the usage of a room's programs: memory, CPU time, processes.

Memory is what belongs to them alone plus their shares of what they share (PSS), so that many forks
of one warm interpreter are not counted as many interpreters. It is asked for only when the cheap
upper bound (the sum of resident sizes) is over the limit.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator

_PAGE = resource.getpagesize()
_TICKS = os.sysconf("SC_CLK_TCK")


class Sample:
    """Usage of all programs together; CPU time only of those still alive."""

    def __init__(self, memory_bytes: int, cpu_seconds: float, processes: int) -> None:
        self.memory_bytes = memory_bytes
        self.cpu_seconds = cpu_seconds
        self.processes = processes


def numbers(proc: str = "/proc") -> Iterator[int]:
    """Yields the ids of all processes that the file system `proc` shows."""
    for entry in os.scandir(proc):
        if entry.name.isdigit():
            yield int(entry.name)


def sample(programs: Iterable[int], memory_limit: int, proc: str = "/proc") -> Sample:
    """A look at `programs`, numbered as in `proc`; those that end meanwhile count as nothing."""
    resident = cpu_ticks = processes = 0
    found = []
    for pid in programs:
        try:
            fields = _contents(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] in (b"Z", b"X"):
            cpu_ticks += int(fields[11]) + int(fields[12])
            continue
        found.append(pid)
        processes += 1
        cpu_ticks += sum(map(int, fields[11:15]))
        resident += int(fields[21]) * _PAGE
    if resident > memory_limit:
        resident = sum(_proportional(f"{proc}/{pid}") for pid in found)
    return Sample(resident, cpu_ticks / _TICKS, processes)


def _contents(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _proportional(place: str) -> int:
    try:
        lines = _contents(f"{place}/smaps_rollup").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(b"Pss:")) * 1024
    except (OSError, IndexError):  # it ended, or has no memory any more
        return 0
