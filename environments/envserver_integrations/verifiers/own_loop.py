"""An event loop in a thread of its own, for code of others.

A worker whose loop is blocked for a second is taken for hung. verifiers imports, validates and
calls its packages on the loop: it gets another one, so that the worker's stays responsive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


class OwnLoop:
    """Runs coroutines on its loop; the thread starts at the first, and ends with the process."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Returns what `coroutine` returns. If cancelled, cancels it and waits for its end."""
        here = asyncio.get_running_loop()
        loop = self._started()
        outcome = here.create_future()
        tasks: list[asyncio.Task[Any]] = []

        def start() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: here.call_soon_threadsafe(_copy, task, outcome))

        loop.call_soon_threadsafe(start)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await asyncio.wait({outcome})
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return self._loop


def _copy(task: asyncio.Task[Any], outcome: asyncio.Future[Any]) -> None:
    if task.cancelled():
        outcome.cancel()
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
