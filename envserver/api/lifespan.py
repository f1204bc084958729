"""Starts and stops an ASGI application, and raises its errors.

uvicorn logs a traceback and ends the process when an application cannot start; here the caller
gets the exception.
"""

from __future__ import annotations

import asyncio
from typing import Any

from envserver_records.cancelling import cancel_and_wait
from starlette.types import ASGIApp, Message


class Lifespan:
    """Starts and stops `app`. Call `stop` after each `start` that returned."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._requests: asyncio.Queue[Message] = asyncio.Queue()
        self._started = asyncio.Event()

    async def start(self) -> None:
        """Waits until the application has started.
        Raises Exception: whatever the application raised instead.
        """
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}}
        self._task = asyncio.ensure_future(self._live(scope))
        self._requests.put_nowait({"type": "lifespan.startup"})
        started = asyncio.ensure_future(self._started.wait())
        try:
            await asyncio.wait({started, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await cancel_and_wait(self._task)
            raise
        finally:
            started.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Waits until the application has stopped; raises what it raised."""
        self._requests.put_nowait({"type": "lifespan.shutdown"})
        await self._task

    async def _live(self, scope: dict[str, Any]) -> None:
        await self._app(scope, self._requests.get, self._hear)

    async def _hear(self, message: Message) -> None:
        # Failures are also raised, so log only the success.
        if message["type"] == "lifespan.startup.complete":
            self._started.set()
