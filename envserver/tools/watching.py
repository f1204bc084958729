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
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import CodeType
from typing import Any

import structlog

from .calling import LIBRARIES, shown_place

BLOCKED_SECONDS = 10.0
_AGAIN_SECONDS = 60.0
_STACK_DEPTH = 6
_RUNS_LOOPS = (
    asyncio.runners.__file__,
    asyncio.base_events.__file__,
    asyncio.events.__file__,
)
_OURS = str(Path(__file__).parents[1])
_HINT = (
    "It stops the whole process. Make it async, call it with asyncio.to_thread, or do it in "
    "`rollout`, which runs in a worker."
)

_watched: set[int] = set()
"""Threads with a loop that is watched."""
_log = structlog.get_logger("envserver.loop")


@asynccontextmanager
async def watched_loop(slow_seconds: float | None = BLOCKED_SECONDS) -> AsyncIterator[None]:
    """Logs what blocks the event loop for `slow_seconds` in the block; a loop has one watcher."""
    loop, thread, stop = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    if slow_seconds is None or thread in _watched:
        yield
        return

    def watch() -> None:
        while not stop.wait(min(1.0, slow_seconds / 4)):
            turned, began, patience = threading.Event(), time.monotonic(), slow_seconds
            with suppress(RuntimeError):  # it has just been closed
                loop.call_soon_threadsafe(turned.set)
            while not (turned.wait(patience) or stop.is_set()):
                seconds = round(time.monotonic() - began, 3)
                _log.warning("loop_is_blocked", seconds=seconds, **_blocker(thread))
                patience = _AGAIN_SECONDS
            if patience == _AGAIN_SECONDS:
                _log.warning("loop_turns_again", seconds=round(time.monotonic() - began, 3))

    _watched.add(thread)
    threading.Thread(target=watch, name="loop-watch", daemon=True).start()
    try:
        yield
    finally:
        _watched.discard(thread)
        stop.set()


def _blocker(thread: int) -> dict[str, Any]:
    """Returns whose code `thread` runs, its place, what to do, and the innermost calls."""
    stack = [
        (frame.f_code, line) for frame, line in traceback.walk_stack(sys._current_frames()[thread])
    ]
    # Further out is the program that runs the loop.
    calls = itertools.takewhile(lambda place: place[0].co_filename not in _RUNS_LOOPS, stack)
    code, line = min(calls, key=_rank, default=stack[0])
    is_own = not code.co_filename.startswith(LIBRARIES)
    return {
        "place": shown_place(code, line),
        "whose": "environment" if is_own else "envserver",
        "hint": _HINT if is_own else "",
        "calls": [
            f"{code.co_filename}:{line} {code.co_name}" for code, line in stack[:_STACK_DEPTH]
        ],
    }


def _rank(call: tuple[CodeType, int]) -> tuple[bool, bool]:
    """Puts code outside of libraries first, then our own."""
    file = call[0].co_filename
    return file.startswith(LIBRARIES), not file.startswith(_OURS)
