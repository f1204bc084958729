"""Waits for what must happen, however slow the machine is."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

# Seconds until a test gives up on a command, an answer or an event that must come: it only guards
# against hanging, so it is long enough for a machine ten times slower than a good one.
PATIENCE: Final = 900.0


async def settled() -> None:
    """Returns when the tasks of this event loop have done all that they can do now."""
    for _ in range(30):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    """Returns when `condition()`, which may be a coroutine, is true; a slow one is asked seldom.

    Raises:
        TimeoutError: it is not true in time.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            asked = time.monotonic()
            holds = condition()
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(max(0.005, 4 * (time.monotonic() - asked)))


async def with_enough_time(
    attempt: Callable[[float], Awaitable[T | None]], seconds: float = 0.5
) -> T:
    """Returns what `attempt(seconds)` returns; tries again with more seconds while that is None.

    For work that must have begun before its deadline comes: how long that takes depends on the
    machine. `attempt` returns None where the deadline came first.
    """
    for factor in (1, 4, 16, 64):
        result = await attempt(factor * seconds)
        if result is not None:
            return result
    raise TimeoutError(f"Nothing had begun after {64 * seconds:g} seconds.")
