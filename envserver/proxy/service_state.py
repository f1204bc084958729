"""State of the environment's services, kept on the server for one attempt (`Services.state`).

In: what makes the state. Out: the state, for each request of the attempt. It is entered once and
left once, in one task, which outlives single requests: so it may hold an `asyncio.TaskGroup`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import structlog

SETTLE_SECONDS = 10.0
"""Seconds for the requests of an ended attempt to stop and for its state to be left."""

_log = structlog.get_logger("envserver.services")


class AttemptState:
    """The state of one attempt, made at once.

    Args:
        make: returns the state, or an async context manager of it.
        rollout_id: for log lines.
    """

    def __init__(self, make: Callable[[], Any], rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._opened.add_done_callback(_look_at)
        self._users = 0
        self._sealed = False
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._own(make))

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Any]:
        """Yields the state, which stays open within the block; raises what making it raised."""
        self._users += 1
        try:
            yield await asyncio.shield(self._opened)
        finally:
            self._users -= 1
            self._changed.set()

    def seal(self) -> None:
        """Leaves the state as soon as no request uses it."""
        self._sealed = True
        self._changed.set()

    async def settle(self) -> None:
        """Waits, for a bounded time, until a sealed state is left."""
        _, late = await asyncio.wait({self._task}, timeout=SETTLE_SECONDS)
        if late:
            _log.error("service_state_does_not_end", rollout_id=self._rollout_id)
            self._task.cancel()

    async def _own(self, make: Callable[[], Any]) -> None:
        try:
            async with _entered(make()) as state:
                self._opened.set_result(state)
                while not self._sealed or self._users:
                    self._changed.clear()
                    await self._changed.wait()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of the environment's code
            if self._opened.done():
                _log.exception("service_state_failed", rollout_id=self._rollout_id)
            else:
                self._opened.set_exception(error)


def _entered(made: Any) -> AbstractAsyncContextManager[Any]:
    return made if isinstance(made, AbstractAsyncContextManager) else nullcontext(made)


def _look_at(opened: asyncio.Future[Any]) -> None:
    """Marks a failure as seen: the attempt may have ended before any request could raise it."""
    if not opened.cancelled():
        opened.exception()
