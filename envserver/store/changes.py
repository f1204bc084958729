"""Wakes coroutines that wait for something to change, so that nothing has to poll."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Changes:
    """A number that grows, and any number of coroutines that wait for it to change."""

    def __init__(self) -> None:
        self.number = 0
        self._grown = asyncio.Event()

    def announce(self, number: int) -> None:
        """Sets the number and wakes all waiting coroutines, if it is a new one."""
        if number == self.number:
            return
        self.number = number
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def wait(self, since: int, timeout: float | None) -> int:
        """Returns the number as soon as it differs from `since`, or after `timeout` seconds."""
        if self.number == since:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._grown.wait()
        return self.number
