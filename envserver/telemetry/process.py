"""Resource usage of the server's process and its descendants, and the lag of its event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from pathlib import Path
from typing import Final, Self

from envserver_records.waiting import cancel_and_wait

from .measures import Reading
from .numbers import SHORT_SECONDS, Distribution

_MOST_CHILDREN: Final = 4096


async def resource_numbers() -> Reading:
    """Returns the numbers of this process and its descendants; `/proc` is read in a thread."""
    return await asyncio.to_thread(_read)


def _read() -> Reading:
    count, rss_bytes, cpu_seconds = _descendants()
    threads = len(list(Path("/proc/self/task").iterdir())) if Path("/proc").is_dir() else 0
    return {
        "threads": threads,
        "children": count,
        "children_resident_bytes": rss_bytes,
        "children_cpu_seconds": cpu_seconds,
    }


def _descendants() -> tuple[int, int, float]:
    """Count, resident bytes and CPU seconds; 0 without /proc."""
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


# A task wakes every 50 ms; how late it wakes is the lag of any other callback at that moment. A
# block of half a second delays every callback within it, so it counts as all the ticks that it
# swallowed.

TICK_SECONDS: Final = 0.05
_WINDOW: Final = 1200
"""Ticks of a minute."""


class LoopLag:
    """Measures the loop in which it is entered."""

    def __init__(self) -> None:
        self.seconds = Distribution(SHORT_SECONDS)
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._ticked_at = time.monotonic()

    @property
    def tick_age_seconds(self) -> float:
        return time.monotonic() - self._ticked_at

    def p99_seconds(self) -> float:
        """Of the last minute; 0 before the first tick."""
        recent = sorted(self._recent)
        return recent[int(0.99 * (len(recent) - 1))] if recent else 0.0

    def begin_anew(self) -> None:
        """Resets the measurement: start-up may block the loop, serving must not."""
        self.seconds = Distribution(SHORT_SECONDS)
        self._recent.clear()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick(), name="loop-lag")
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._task)

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._ticked_at = time.monotonic()
            late = max(0.0, self._ticked_at - due)
            self._add(late)
            while (late := late - TICK_SECONDS) > 0:
                self._add(late)

    def _add(self, late: float) -> None:
        self.seconds.add(late)
        self._recent.append(late)
