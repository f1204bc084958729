"""Resource usage of the server's process and its descendants."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from .numbers import gauge, single

_MOST_CHILDREN: Final = 4096


class Resources:
    """This process under `prometheus_client`'s names; its descendants as sums."""

    def __init__(self) -> None:
        self._own = ProcessCollector(registry=None)

    async def families(self) -> Iterable[Metric]:
        """Returns the current numbers; `/proc` is read in a thread."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Metric]:
        count, rss_bytes, cpu_seconds = _descendants()
        threads = len(list(Path("/proc/self/task").iterdir())) if Path("/proc").is_dir() else 0
        return [
            *self._own.collect(),
            gauge("envserver_threads", "Threads of the server's process", (), single(threads)),
            gauge("envserver_children", "Processes below the server's", (), single(count)),
            gauge(
                "envserver_children_resident_bytes",
                "Resident memory of the child processes",
                (),
                single(rss_bytes),
            ),
            gauge(
                "envserver_children_cpu_seconds",
                "CPU time of those that live, together; falls when one ends",
                (),
                single(cpu_seconds),
            ),
        ]


def _descendants() -> tuple[int, int, float]:
    """Returns the descendants' count, resident bytes and CPU seconds; 0 without /proc."""
    page, ticks = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    count = rss_pages = cpu_ticks = 0
    waiting = _children(os.getpid())
    while waiting and count < _MOST_CHILDREN:
        pid = waiting.pop()
        try:
            # Skip the name, which may hold anything: state is the first field.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        count += 1
        cpu_ticks += int(fields[11]) + int(fields[12])
        rss_pages += int(fields[21])
        waiting += _children(pid)
    return count, rss_pages * page, cpu_ticks / ticks


def _children(pid: int) -> list[int]:
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except OSError:
        return found  # it has just ended, or this system does not list children
    return found
