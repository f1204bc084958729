"""Counts what the programs of a sandbox used, and samples what they use now."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .program import MB

_SUMS = ("wall_seconds", "cpu_seconds", "read_bytes", "written_bytes", "output_bytes", "executions")
_PEAKS = ("disk_bytes", "peak_processes")


class Totals:
    """Total usage of all programs of a sandbox."""

    wall_seconds = 0.0
    cpu_seconds = 0.0
    peak_memory = 0
    read_bytes = 0
    written_bytes = 0
    output_bytes = 0
    disk_bytes = 0
    peak_processes = 0
    cpu_exact = False
    memory_exact = False

    def __init__(self, executions: int = 0) -> None:
        self.executions = executions
        self.killed: dict[str, int] = {}

    def add(self, other: Totals) -> None:
        self.cpu_exact = other.cpu_exact
        if other.memory_exact:  # what comes after it, and is sampled, was less
            self.peak_memory, self.memory_exact = other.peak_memory, True
        elif not self.memory_exact:
            self.peak_memory = max(self.peak_memory, other.peak_memory)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _PEAKS:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for reason, count in other.killed.items():
            self.killed[reason] = self.killed.get(reason, 0) + count

    def as_record(self) -> dict[str, Any]:
        same = (*_SUMS, "peak_processes", "cpu_exact", "memory_exact", "killed")
        return {
            **{name: getattr(self, name) for name in same},
            "peak_memory_mb": self.peak_memory / MB,
            "disk_mb": self.disk_bytes / MB,
        }


class Accounts:
    """Resource usage of all children that this process has waited for, and of their descendants.

    The files are opened once: a process that may not be traced cannot open its own any more.
    """

    def __init__(self) -> None:
        self._whole = _opened("/proc/self/io")
        self._own = _opened(f"/proc/self/task/{os.getpid()}/io")

    cpu_exact = False

    def cpu_seconds(self, living: float = 0.0) -> float:
        """User and system time, with that of the `living` processes."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime + living

    def peak_memory(self) -> int:
        """The kernel's count of the most bytes so far, files of programs included; 0: none."""
        return 0

    def peak_tasks(self) -> int:
        """The kernel's count of the most processes and threads so far; 0: none."""
        return 0

    def memory_kills(self) -> int:
        """How many programs the kernel has killed for want of memory; 0 where it does not say."""
        return 0

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes read and written through any descriptor (0, 0: the kernel does not say)."""
        whole, own = _io_of(self._whole), _io_of(self._own)
        return whole[0] - own[0], whole[1] - own[1]


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a kernel that does not count
        return None


def _io_of(descriptor: int | None) -> tuple[int, int]:
    if descriptor is None:
        return 0, 0
    try:
        fields = dict(line.split(b": ") for line in os.pread(descriptor, 4096, 0).splitlines())
    except OSError:
        return 0, 0
    return int(fields[b"rchar"]), int(fields[b"wchar"])


# Memory is what belongs to them alone plus their shares of what they share (PSS), so that many
# forks of one warm interpreter are not counted as many interpreters. It is asked for only when the
# cheap upper bound (the sum of resident sizes) is over the limit.

_PAGE = resource.getpagesize()
_TICKS = os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """Usage of all programs together; CPU time only of those still alive."""

    memory_bytes: int
    cpu_seconds: float
    processes: int


def numbers(proc: str = "/proc") -> Iterator[int]:
    """The ids of all processes that the file system `proc` shows."""
    for entry in os.scandir(proc):
        if entry.name.isdigit():
            yield int(entry.name)


def sample(programs: Iterable[int], memory_limit: int, proc: str = "/proc") -> Sample:
    """`programs` are numbered as in `proc`; those that end meanwhile count as nothing."""
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
