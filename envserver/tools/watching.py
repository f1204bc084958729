"""Watches an event loop, on which an environment's services and hooks run.

A daemon thread lets the loop set an event once a second at most. If the loop does not, it logs
whose code blocks it: the innermost code outside of libraries that the loop runs, else our own. It
only reports; code that holds Python's global lock stops it, too.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import structlog

from .calling import LIBRARIES, shown_place

BLOCKED_SECONDS: Final = 10.0
_AGAIN_SECONDS: Final = 60.0
_STACK_DEPTH: Final = 6
_RUNS_LOOPS: Final = (
    asyncio.runners.__file__,
    asyncio.base_events.__file__,
    asyncio.events.__file__,
)
_OURS: Final = str(Path(__file__).parents[1])
_HINT: Final = (
    "It stops the whole process. Make it async, call it with asyncio.to_thread, or do it in "
    "`rollout`, which runs in a worker."
)

_watched: set[int] = set()
"""Threads with a loop that is watched."""
_log = structlog.get_logger("envserver.loop")


@asynccontextmanager
async def watched_loop(slow_seconds: float | None = BLOCKED_SECONDS) -> AsyncIterator[None]:
    """Logs what blocks the event loop for `slow_seconds` in the block; a loop has one watcher."""
    thread = threading.get_ident()
    if slow_seconds is None or thread in _watched:
        yield
        return
    _watched.add(thread)
    stop = threading.Event()
    watch = (asyncio.get_running_loop(), thread, slow_seconds, stop)
    threading.Thread(target=_watch, args=watch, name="loop-watch", daemon=True).start()
    try:
        yield
    finally:
        _watched.discard(thread)
        stop.set()


def _watch(
    loop: asyncio.AbstractEventLoop, thread: int, slow_seconds: float, stop: threading.Event
) -> None:
    while not stop.wait(min(1.0, slow_seconds / 4)):
        turned, began, patience = threading.Event(), time.monotonic(), slow_seconds
        try:
            loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # it is closed
            return
        while not (turned.wait(patience) or stop.is_set()):
            patience = _AGAIN_SECONDS
            if (frame := sys._current_frames().get(thread)) is not None:
                _log.warning("loop_is_blocked", seconds=_since(began), **_blocker(frame))
        if patience == _AGAIN_SECONDS:
            _log.warning("loop_turns_again", seconds=_since(began))


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _blocker(frame: FrameType) -> dict[str, Any]:
    """Returns whose code it is, its place, what to do, and the innermost calls."""
    calls = [(one.f_code, line) for one, line in traceback.walk_stack(frame)]
    shown = [f"{one.co_filename}:{line} {one.co_name}" for one, line in calls[:_STACK_DEPTH]]
    # Further out is the program that runs the loop.
    calls = [*itertools.takewhile(lambda one: one[0].co_filename not in _RUNS_LOOPS, calls)]
    own = [one for one in calls if not one[0].co_filename.startswith(LIBRARIES)]
    ours = [one for one in calls if one[0].co_filename.startswith(_OURS)]
    place = shown_place(*(own or ours or calls)[0]) if calls else ""
    whose = {"whose": "environment", "hint": _HINT} if own else {"whose": "envserver"}
    return {"place": place, **whose, "calls": shown[::-1]}
