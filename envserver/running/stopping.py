"""Runs work on groups to its end, or until it is asked to stop. Sets no signal handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

from envserver_records.waiting import cancel_and_wait

Ending = Literal["done", "stopped", "overdue"]
"""How a run ended: by itself, when asked to stop, or cancelled after its time to stop."""


class Stoppable(Protocol):
    @property
    def open_groups(self) -> int: ...

    def drain(self) -> None: ...


class Stop:
    """Asks one run to stop. Call its methods only in the thread of the run's event loop."""

    def __init__(self) -> None:
        self.requested = False
        self.cancelled = False
        self._scheduler: Stoppable | None = None
        self._drain: Callable[[], None] = _nothing
        self._cancel: Callable[[], object] = _nothing

    @property
    def open_groups(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.open_groups

    def finish(self) -> None:
        """Lets no further group begin; the run ends when the open ones are done."""
        if not self.requested:
            self.requested = True
            self._drain()

    def at_once(self) -> None:
        """Cancels the open groups."""
        self.requested = self.cancelled = True
        self._cancel()

    def attach(
        self, scheduler: Stoppable, drain: Callable[[], None], cancel: Callable[[], object]
    ) -> None:
        """Called when the run has begun: sets what `finish` and `at_once` do from now on."""
        self._scheduler, self._drain, self._cancel = scheduler, drain, cancel
        if self.cancelled:
            cancel()
        elif self.requested:
            drain()

    def detach(self) -> None:
        self._scheduler, self._drain, self._cancel = None, _nothing, _nothing


@asynccontextmanager
async def beside(name: str, work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Runs `work` in the background of the block; await the task, or it is cancelled at the end."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        await cancel_and_wait(task)


async def run_until_stopped(
    work: Coroutine[Any, Any, None],
    scheduler: Stoppable,
    stop: Stop,
    *,
    on_stop: Callable[[], None] = lambda: None,
    drain_seconds: float | None = None,
) -> Ending:
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(work)
    overdue = False

    def drain() -> None:
        scheduler.drain()
        on_stop()
        if drain_seconds is not None:
            loop.call_later(drain_seconds, on_deadline)

    def on_deadline() -> None:
        nonlocal overdue
        if not running.done():
            overdue = True
            running.cancel()

    stop.attach(scheduler, drain, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        if not (stop.cancelled or overdue):
            raise
    finally:
        stop.detach()
    if overdue:
        return "overdue"
    return "stopped" if stop.requested else "done"


def _nothing() -> None: ...
