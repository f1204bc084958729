"""Measures the lag of the event loop while the server runs.

A task wakes every 50 ms; how late it wakes is the lag of any other callback at that moment. A block
of half a second delays every callback within it, so it counts as all the ticks that it swallowed.
If slow callbacks are logged, a thread records the stack of the loop when it is late.
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
from envserver_records.cancelling import cancel_and_wait

from .numbers import SHORT_SECONDS, Distribution

TICK_SECONDS: Final = 0.05
_WINDOW: Final = 1200
"""Ticks of a minute."""
_STACK_DEPTH: Final = 6

_log = structlog.get_logger("envserver.loop")


class LoopLag:
    """Measures the loop in which it is entered with `async with`.

    Args:
        slow_seconds: slower callbacks are logged with their stack; None: none are.
    """

    def __init__(self, slow_seconds: float | None = None) -> None:
        self.seconds = Distribution(SHORT_SECONDS)
        """Lag of all ticks so far."""
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._ticked_at = time.monotonic()
        self._slow_seconds = slow_seconds
        self._stop = threading.Event()

    @property
    def tick_age_seconds(self) -> float:
        """Seconds since the loop last ran."""
        return time.monotonic() - self._ticked_at

    def p99_seconds(self) -> float:
        """Returns the 99th percentile of the last minute; 0 before the first tick."""
        recent = sorted(self._recent)
        return recent[int(0.99 * (len(recent) - 1))] if recent else 0.0

    def begin_anew(self) -> None:
        """Resets the measurement: start-up may block the loop, serving must not."""
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
