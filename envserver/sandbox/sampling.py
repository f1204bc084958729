"""How much the programs of a room use at a moment: memory, CPU time, processes.

Memory is what belongs to them alone plus their shares of what they share (PSS), so that many forks
of one warm interpreter are not counted as many interpreters. It is asked for only when the cheap
upper bound (the sum of resident sizes) is over the limit.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PAGE = resource.getpagesize()
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """Of all programs together; CPU time is of those that still live."""

    memory_bytes: int
    cpu_seconds: float
    processes: int


def sample(programs: Iterable[int], memory_limit: int) -> Sample:
    """A look at `programs`; those that end meanwhile count as nothing."""
    resident = cpu_ticks = processes = 0
    found = []
    for pid in programs:
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
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
        resident = sum(_proportional(pid) for pid in found)
    return Sample(resident, cpu_ticks / _TICKS, processes)


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(b"Pss:")) * 1024
    except (OSError, IndexError):  # it ended, or has no memory any more
        return 0
