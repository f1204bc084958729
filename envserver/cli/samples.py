"""Samples of conversations on a terminal while groups are made (`--verbose`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from envserver_records.records import Group

from .console import Console
from .conversation import show_sample

FIRST_GROUPS: Final = 3
"""Groups that are all shown; of later ones, one each `SECONDS_BETWEEN`."""
SECONDS_BETWEEN: Final = 10.0
_LOOK_SECONDS: Final = 0.5


class Samples:
    """Shows a group now and then; may be given every group.

    Args:
        clock: seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._shown = 0
        self._shown_at = -math.inf
        self._printing = asyncio.Lock()

    async def __call__(self, group: Group) -> None:
        """Shows the best and the worst rollout of `group`, if it is time for a sample."""
        now = self._clock()
        if self._shown >= FIRST_GROUPS and now < self._shown_at + SECONDS_BETWEEN:
            return
        self._shown += 1
        self._shown_at = now
        async with self._printing:  # groups may be done at the same time
            await asyncio.to_thread(show_sample, self._console, group)


@asynccontextmanager
async def sampled(console: Console, latest: Callable[[], Group | None]) -> AsyncIterator[None]:
    """Shows samples of the groups that `latest` returns while the block runs."""
    samples = Samples(console)

    async def look() -> None:
        seen: Group | None = None
        while True:
            group = latest()
            if group is not None and group is not seen:
                seen = group
                await samples(group)
            await asyncio.sleep(_LOOK_SECONDS)

    task = asyncio.create_task(look(), name="samples")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
