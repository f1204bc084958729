"""Ends tasks of asyncio."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancels these tasks and waits until all have ended; returns their results and errors."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
