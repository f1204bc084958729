"""Shows what the server of this process does while it runs: tables on a terminal, else lines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from envserver_records.errors import StoreError
from rich.live import Live

from ..telemetry.history import Numbers, Row
from .console import Console
from .overview import WINDOW, Overview

_TABLE_SECONDS: Final = 2.0
_LINE_SECONDS: Final = 60.0


@asynccontextmanager
async def shown(
    console: Console,
    numbers: Callable[[], Awaitable[Numbers]],
    alarms: Callable[[], list[str]],
) -> AsyncIterator[None]:
    """Shows an overview of `numbers`, and what is wrong, while the block runs.

    What is printed appears above it.
    """
    rows: deque[Row] = deque(maxlen=int(WINDOW / _TABLE_SECONDS) + 1)
    live = Live(console=console, auto_refresh=False, transient=True)

    async def look() -> Overview:
        with suppress(StoreError):  # the log has it; the tables show the last numbers
            rows.append((time.monotonic(), await numbers()))
        return Overview(rows or [(0.0, {})], alarms())

    async def tables() -> None:
        while True:
            # Of many environments, this takes long: not on the event loop.
            live.update(await asyncio.to_thread((await look()).tables), refresh=True)
            await asyncio.sleep(_TABLE_SECONDS)

    async def lines() -> None:
        while True:
            await look()
            await asyncio.sleep(_LINE_SECONDS)
            line = await asyncio.to_thread((await look()).line)
            console.say(line)

    task = asyncio.create_task(tables() if console.is_terminal else lines(), name="overview")
    if console.is_terminal:
        live.start()
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        live.stop()
