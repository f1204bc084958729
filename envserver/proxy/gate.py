"""Pauses calls during weight updates.

`pause` closes the gate, `resume` opens it. Calls that arrive in between wait, within their
rollout's time. Each pause chooses what happens to the calls that are at the engine:

    drain   they finish first; then the pause has begun
    keep    they continue during the update (their tokens may come from two versions, and are
            flagged)
    abort   they are stopped unrecorded and sent again after the pause (a stream that the agent has
            begun to read ends with an error instead)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from ..models.engine import count_as_waiting

InFlight = Literal["drain", "keep", "abort"]


class Aborted(Exception): ...


class Gate:
    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._passing: set[asyncio.Timeout] = set()
        self._aborted: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.waiting = 0

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def in_flight(self) -> int:
        return len(self._passing)

    async def pause(self, in_flight: InFlight, timeout_seconds: float) -> bool:
        """Closes the gate. A second call replaces the choice of the first.

        Returns:
            True if no call is left at the engine, and always for "keep"; False after the timeout.
        """
        self._open.clear()
        if in_flight == "keep":
            return True
        if in_flight == "abort":
            now = asyncio.get_running_loop().time()
            for timeout in self._passing - self._aborted:
                self._aborted.add(timeout)
                timeout.reschedule(now)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def resume(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Waits until the gate is open, then runs the block as a call at the engine.

        Raises Aborted if a pause stopped the block.
        """
        self.waiting += 1
        try:
            while not self._open.is_set():
                with count_as_waiting():
                    await self._open.wait()
        finally:
            self.waiting -= 1
        was_aborted = False
        try:
            async with asyncio.timeout(None) as timeout:
                self._passing.add(timeout)
                self._empty.clear()
                try:
                    yield
                finally:
                    was_aborted = timeout in self._aborted
                    self._passing.discard(timeout)
                    self._aborted.discard(timeout)
                    if not self._passing:
                        self._empty.set()
        except TimeoutError:
            if was_aborted:
                raise Aborted from None
            raise
