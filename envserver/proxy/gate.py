"""Weight updates: calls wait before the engine while its weights change.

`pause` closes the gate, `resume` opens it. Calls that come meanwhile wait, within their rollout's
time. What becomes of those that are at the engine is chosen with each pause:

    drain   they come to their end first; then the pause has begun
    keep    they go on over the update (their tokens may be of two versions, and are marked so)
    abort   they are ended, nothing of them is recorded, and they are asked again after the pause
            (an answer that the agent has begun to read as a stream is broken off instead)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from ..models.measured import count_as_waiting

InFlight = Literal["drain", "keep", "abort"]


class Aborted(Exception):
    """The work within `Gate.passing` was ended by a pause."""


class Gate:
    """Between all agents and the engine."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._passing: set[asyncio.Timeout] = set()
        self._aborted: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._waiting = 0

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def in_flight(self) -> int:
        """Calls at the engine."""
        return len(self._passing)

    @property
    def waiting(self) -> int:
        """Calls before the gate."""
        return self._waiting

    async def pause(self, in_flight: InFlight, timeout_seconds: float) -> bool:
        """Closes the gate; pausing again chooses anew.

        Returns:
            Whether no call is left at the engine ("keep": there may be some, and it is True).
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
        """Opens the gate; an open one stays so."""
        self._open.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Waits until the gate is open; the block within is then at the engine.

        Raises:
            Aborted: a pause ended the block.
        """
        await self._until_open()
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._passing.add(timeout)
                self._empty.clear()
                yield
        except TimeoutError:
            if timeout in self._aborted:
                raise Aborted from None
            raise
        finally:
            self._passing.discard(timeout)
            self._aborted.discard(timeout)
            if not self._passing:
                self._empty.set()

    async def _until_open(self) -> None:
        self._waiting += 1
        try:
            while not self._open.is_set():
                with count_as_waiting():
                    await self._open.wait()
        finally:
            self._waiting -= 1
