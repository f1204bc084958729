"""Exponential back-off between tries, several tasks in order, and their end."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MAX_EXPONENT: Final = 64
"""Bounds the power: a server may be away for thousands of tries, and 2.0 ** 1024 overflows."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow by `factor` and stay below `max_seconds`, jitter included.

    `jitter`: (low, high), the factors that a random number spreads a pause over.
    """

    first_seconds: float
    max_seconds: float = math.inf
    factor: float = 2.0
    jitter: tuple[float, float] = (1.0, 1.0)

    def seconds(self, failures: int, draw: float = 1.0) -> float:
        """The pause after `failures` in a row (0: none); `draw` in [0, 1] is for `jitter`."""
        if failures < 1:
            return 0.0
        grown = self.first_seconds * self.factor ** min(failures - 1, _MAX_EXPONENT)
        low, high = self.jitter
        spread = low + (high - low) * draw
        return min(self.max_seconds, min(self.max_seconds, grown) * spread)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancels these tasks and waits until all have ended; returns their results and errors."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def in_order(
    work: Iterable[T],
    do: Callable[[T], Coroutine[Any, Any, R]],
    most: int,
    *,
    size: Callable[[T], int] = lambda item: 1,
    in_thread: bool = False,
) -> AsyncGenerator[tuple[T, R]]:
    """Yields each piece of work with its result, in order; several are done at a time.

    No more is begun while the sizes of what is being done add up to `most`. `in_thread`: `work` is
    read in a thread.
    """
    waiting = iter(work)
    begun: deque[tuple[T, asyncio.Task[R]]] = deque()
    busy, more = 0, True
    try:
        while more or begun:
            while more and busy < most:
                reading = asyncio.to_thread(next, waiting, None) if in_thread else None
                piece = next(waiting, None) if reading is None else await reading
                more = piece is not None
                if piece is not None:
                    begun.append((piece, asyncio.create_task(do(piece))))
                    busy += size(piece)
            if begun:
                item, doing = begun[0]
                result = await doing
                begun.popleft()
                busy -= size(item)
                yield item, result
    finally:
        await cancel_and_wait(*(doing for _, doing in begun))
