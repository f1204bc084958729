"""Adds up what the programs of a sandbox used."""

from __future__ import annotations

import os
import resource

from .program import MB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
        """Sums, and the highest peaks."""
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
        """Returns it in the fields of SandboxUsage."""
        return {
            "wall_seconds": self.wall_seconds,
            "cpu_seconds": self.cpu_seconds,
            "cpu_exact": self.cpu_exact,
            "peak_memory_mb": self.peak_memory / MB,
            "memory_exact": self.memory_exact,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "output_bytes": self.output_bytes,
            "disk_mb": self.disk_bytes / MB,
            "peak_processes": self.peak_processes,
            "executions": self.executions,
            "killed": self.killed,
        }


class Accounts:
    """Resource usage of all children that this process has waited for, and of their descendants.

    The files are opened once: a process that may not be traced cannot open its own any more.
    """

    def __init__(self) -> None:
        self._whole = _opened("/proc/self/io")
        self._own = _opened(f"/proc/self/task/{os.getpid()}/io")

    cpu_exact = False
    """Whether `cpu_seconds` misses nothing."""

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
