"""Before the engine of a joiner: open while the server is heard of and has not paused it.

A joiner that does not hear of the server cannot know which policy its engine serves. So its calls
wait, and what was sampled without knowing is thrown away and asked again: no token gets a version
that it may not have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..proxy.gate import Aborted, Gate


class RunnerGate(Gate):
    """See the module. Until `hear` is called first, nothing passes.

    Attributes:
        longest_silence_seconds: how long after the last word of the server calls still pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_silence_seconds = 0.0
        self._heard_at = float("-inf")
        self._heard = asyncio.Event()

    @property
    def is_fresh(self) -> bool:
        """Whether the server was heard of lately."""
        return time.monotonic() - self._heard_at <= self.longest_silence_seconds

    def hear(self, asked_at: float) -> None:
        """The server has answered what was asked at `asked_at` (`time.monotonic()`)."""
        self._heard_at = max(self._heard_at, asked_at)
        self._heard.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """As `Gate.passing`.

        Raises:
            Aborted: also when the server was not heard of meanwhile.
        """
        while not self.is_fresh:
            self._heard.clear()
            await self._heard.wait()
        async with super().passing():
            yield
        if not self.is_fresh:
            raise Aborted
