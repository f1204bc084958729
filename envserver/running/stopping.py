"""Runs a scheduler until its work is done or a signal stops it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol

from .tally import counted

Ending = Literal["done", "stopped", "overdue"]
"""Of a run: by itself, by a signal, or by the end of the time that a signal left it."""


class Stoppable(Protocol):
    """What makes groups, and can be told to begin no more."""

    @property
    def open_groups(self) -> int: ...

    def drain(self) -> None: ...


async def run_until_stopped(
    work: Coroutine[Any, Any, None],
    scheduler: Stoppable,
    say: Callable[[str], object],
    *,
    on_stop: Callable[[], None] = lambda: None,
    drain_seconds: float | None = None,
) -> Ending:
    """Awaits `work`, which runs `scheduler`; how it ended.

    The first SIGINT or SIGTERM lets the open groups end, the second ends everything at once.

    Args:
        on_stop: called at the first signal.
        drain_seconds: after which the groups that are still open are cancelled; unset: never.
    """
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(work)
    ending: Ending = "done"

    def on_signal() -> None:
        nonlocal ending
        if ending != "done":
            running.cancel()
            return
        ending = "stopped"
        say(f"Finishing {counted(scheduler.open_groups, 'open group')}; again stops at once.")
        scheduler.drain()
        on_stop()
        if drain_seconds is not None:
            loop.call_later(drain_seconds, on_deadline)

    def on_deadline() -> None:
        nonlocal ending
        if not running.done():
            ending = "overdue"
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await running
    except asyncio.CancelledError:
        if ending == "done":
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return ending
