"""A context that is entered and left in a task of its own.

What holds a task group (an MCP client does) must be left by the task that entered it, and wraps
exceptions that cross it. Here they do not cross it, and any task may leave the block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

T = TypeVar("T")
LEAVE_SECONDS = 10.0
"""Seconds to leave the context; then it is cancelled."""


@asynccontextmanager
async def in_own_task(make: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """Enters what `make` returns and leaves it at the end of the block. Raises what entering it
    raised, without a group around a single exception."""
    opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def hold() -> None:
        try:
            async with make() as value:
                opened.set_result(value)
                await leave.wait()
        except Exception as error:  # noqa: BLE001 - the task that waits for it gets it
            if not opened.done():
                opened.set_exception(_single(error))
                return
            import structlog  # what only imports an environment does without it

            log = structlog.get_logger("envserver.tools")
            log.warning("context_left_badly", error=str(_single(error)))

    task = asyncio.create_task(hold())
    try:
        yield await opened
    finally:
        leave.set()
        if opened.cancelled() or not opened.done():
            task.cancel()
        _, late = await asyncio.wait({task}, timeout=LEAVE_SECONDS)
        for one in late:
            one.cancel()


def _single(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
