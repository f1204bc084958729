"""Waits for what must happen, however slow the machine is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def settled() -> None:
    """Returns when the tasks of this event loop have done all that they can do now."""
    for _ in range(30):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], seconds: float = 180.0) -> None:
    """Returns as soon as `condition()`, which may be a coroutine, is true.

    Raises:
        TimeoutError: it is not true after `seconds`.
    """
    async with asyncio.timeout(seconds):
        while True:
            holds = condition()
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(0.005)
