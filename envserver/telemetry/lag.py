"""How late the event loop is, measured as long as the server runs.

A task asks to be woken every 50 ms; how much later it is woken is the lag that any other callback
had at that moment. A block of half a second delays everybody who came within it, so it counts as
all the ticks that it swallowed. Where slow callbacks are looked for, a thread notes what the loop
was doing when it was late.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections import deque
from typing import Final, Self

import structlog

from .numbers import SHORT_SECONDS, Distribution

TICK_SECONDS: Final = 0.05
_WINDOW: Final = 1200
"""Ticks of a minute."""
_STACK_DEPTH: Final = 6

_log = structlog.get_logger("envserver.loop")


class LoopLag:
    """`async with` it in the loop that is to be measured.

    Args:
        slow_seconds: a callback that takes longer is logged with its place; None: none is.
    """

    def __init__(self, slow_seconds: float | None = None) -> None:
        self.seconds = Distribution(SHORT_SECONDS)
        """Of all ticks so far."""
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._ticked_at = time.monotonic()
        self._slow_seconds = slow_seconds
        self._stop = threading.Event()

    @property
    def tick_age_seconds(self) -> float:
        """Since the loop was last seen alive."""
        return time.monotonic() - self._ticked_at

    def p99_seconds(self) -> float:
        """At the 99th percentile of the last minute; 0 before the first tick."""
        recent = sorted(self._recent)
        return recent[int(0.99 * (len(recent) - 1))] if recent else 0.0

    def begin_anew(self) -> None:
        """Forgets what was measured: loading what is needed blocks the loop, serving must not."""
        self.seconds = Distribution(SHORT_SECONDS)
        self._recent.clear()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick(), name="loop-lag")
        if self._slow_seconds is not None:
            self._ticked_at = time.monotonic()
            watch = (self._slow_seconds, threading.get_ident())
            threading.Thread(target=self._watch, args=watch, name="loop-watch", daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

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

    def _watch(self, slow_seconds: float, loop_thread: int) -> None:
        reported_at = 0.0
        while not self._stop.wait(TICK_SECONDS):
            ticked_at = self._ticked_at
            late = time.monotonic() - ticked_at - TICK_SECONDS
            if late < slow_seconds or ticked_at == reported_at:
                continue
            reported_at = ticked_at
            frame = sys._current_frames().get(loop_thread)
            if frame is not None:
                stack = traceback.extract_stack(frame)[-_STACK_DEPTH:]
                places = [f"{one.filename}:{one.lineno} {one.name}" for one in stack]
                _log.warning("loop_is_blocked", seconds=round(late, 3), stack=places)
