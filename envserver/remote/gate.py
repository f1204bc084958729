"""Pauses the runner's model calls unless the server was heard from recently and has not paused
them.

Without contact to the server, a runner cannot know which policy version its engine serves. So its
calls wait, and tokens sampled in the meantime are discarded and sampled again: no token is
labelled with a wrong version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..proxy.gate import Aborted, Gate


class RunnerGate(Gate):
    """A gate that stays closed until `hear` is first called, and whenever the server is silent.

    Attributes:
        longest_silence_seconds: time after the last response during which calls still pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_silence_seconds = 0.0
        self._heard_at = float("-inf")
        self._heard = asyncio.Event()

    @property
    def is_fresh(self) -> bool:
        """Whether the server was heard from recently."""
        return time.monotonic() - self._heard_at <= self.longest_silence_seconds

    def hear(self, asked_at: float) -> None:
        """Records a response to a request sent at `asked_at` (`time.monotonic()`)."""
        self._heard_at = max(self._heard_at, asked_at)
        self._heard.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Like `Gate.passing`.
        Raises Aborted: also when contact to the server was lost in the meantime.
        """
        while not self.is_fresh:
            self._heard.clear()
            await self._heard.wait()
        async with super().passing():
            yield
        if not self.is_fresh:
            raise Aborted
