"""What the kernel says about processes: who lives, what they hold, how much is theirs alone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

_numbers = itertools.count(3600)


def marked() -> str:
    """Returns a number of seconds that nobody else sleeps."""
    return f"{next(_numbers)}.{os.getpid()}"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parents() -> dict[int, int]:
    """The parent of every process that is not a zombie."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if fields[0] not in "ZX":
                found[int(entry.name)] = int(fields[1])
    return found


def alive_with(mark: str) -> list[int]:
    """Returns the processes named `mark`, or that have it as an argument, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, state = (entry / "stat").read_text().rpartition(")")
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (mark in name or mark.encode() in words) and state.split()[0] not in "ZX":
            found.append(int(entry.name))
    return found


def descendants(pid: int) -> set[int]:
    known = parents()
    found = {pid}
    while True:
        more = {child for child, parent in known.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


def command(pid: int) -> str:
    """Its words, or "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def mounts(pid: int) -> int:
    return len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())


def own_megabytes(pid: int) -> float:
    """Memory without files, whether or not forks share it: who forks often shares it by turns."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of processes, with that of their children that have ended."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")
