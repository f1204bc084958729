"""Limits the calls in flight to one replica; the limit may change while calls wait."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """`limit` slots, taken with `async with`, first come, first served.

    Args:
        used: slots that are taken; over `limit` for a time after it was lowered.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Number of calls that have no slot yet."""
        return len(self._waiting)

    @property
    def rounds(self) -> int:
        """Number of full releases of all slots before a call that arrives now gets one."""
        return (self.used + len(self._waiting)) // self.limit

    def resize(self, limit: int) -> None:
        """Changes the limit; calls that have a slot keep it."""
        self.limit = limit
        self._hand_out()

    async def __aenter__(self) -> None:
        if not self.rounds:
            self.used += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            elif not place.cancelled():
                await self.__aexit__()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self.used -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self.used < self.limit:
            place = self._waiting.popleft()
            if not place.done():
                self.used += 1
                place.set_result(None)
