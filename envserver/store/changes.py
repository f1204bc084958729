"""Waking those who wait for groups: no one asks again and again."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Changes:
    """A number that grows, and any number of coroutines that wait until it does."""

    def __init__(self) -> None:
        self.number = 0
        self._grown = asyncio.Event()

    def announce(self, number: int) -> None:
        """Wakes everybody if `number` is another one than before."""
        if number == self.number:
            return
        self.number = number
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def wait(self, since: int, timeout: float | None) -> int:
        """The number, as soon as it is not `since`, or when `timeout` seconds are over."""
        if self.number == since:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._grown.wait()
        return self.number
