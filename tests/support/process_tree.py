"""What the kernel says about processes: who lives, what they hold, how much is theirs alone."""

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_numbers = itertools.count(3600)


def marked() -> str:
    """Returns a number of seconds that nobody else sleeps."""
    return f"{next(_numbers)}.{os.getpid()}"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _stat(pid: int) -> tuple[str, list[str]]:
    """Its name and its numbers from the state on; of one that is gone "" and none."""
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "", []
    return name.partition("(")[2], fields.split()  # before it stands its id, which may be a mark


def _living() -> Iterator[tuple[int, str, list[str]]]:
    """Every process that is not a zombie, with what `_stat` says of it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            name, fields = _stat(int(entry.name))
            if fields and fields[0] not in "ZX":
                yield int(entry.name), name, fields


def alive(pid: int) -> bool:
    """Whether it runs (a zombie does not)."""
    return _stat(pid)[1][:1] not in ([], ["Z"], ["X"])


def parents() -> dict[int, int]:
    """The parent of every process that is not a zombie."""
    return {pid: int(fields[1]) for pid, _, fields in _living()}


def alive_with(mark: str) -> list[int]:
    """Returns the processes named `mark`, or that have it as an argument, without zombies."""
    return [pid for pid, name, _ in _living() if mark in name or mark.encode() in _words(pid)]


def descendants(pid: int) -> set[int]:
    known = parents()
    found = last = {pid}
    while last := {child for child, parent in known.items() if parent in last}:
        found |= last
    return found - {pid}


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def command(pid: int) -> str:
    """Its words, or "" when it is gone."""
    return b" ".join(_words(pid)).decode()


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
    ticks = sum(int(spent) for pid in pids for spent in _stat(pid)[1][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")
