"""Calls in flight to one replica, bounded by a number that may change while calls wait."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """`async with` it: waits for one of `limit` slots, first come, first served.

    Args:
        used: slots that are taken; over `limit` for a time after it was lowered.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Calls that have no slot yet."""
        return len(self._waiting)

    @property
    def rounds(self) -> int:
        """How many times all slots must be given back before a call that comes now gets one."""
        return (self.used + len(self._waiting)) // self.limit

    def resize(self, limit: int) -> None:
        """Changes the limit; whoever has a slot keeps it."""
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
