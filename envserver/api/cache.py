"""A cache of values that are expensive to make. Evicts the least recently used values when full,
and values unused for a while.

What holds: concurrent requests for a key load it once; if one caller is cancelled or the load
fails, the others still get the value, or the same error.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """A cache of values by key.

    Args:
        load: makes the values of missing keys.
        size_bytes: returns the size of a value.
        most_bytes: maximum total size of the kept values.
        idle_seconds: values unused for this long are evicted when the next value is added.
    """

    def __init__(
        self,
        load: Callable[[Sequence[str]], Awaitable[Sequence[V]]],
        size_bytes: Callable[[V], int],
        most_bytes: int,
        *,
        idle_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._size_bytes = size_bytes
        self._most_bytes = most_bytes
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, V]] = OrderedDict()
        self._bytes = 0
        self._loading: dict[str, asyncio.Task[dict[str, V]]] = {}

    async def get(self, keys: Sequence[str]) -> list[V]:
        """Returns the values of `keys`, in order; raises what `load` raises."""
        found: dict[str, V] = {}
        now = self._clock()
        for key in keys:
            if key in self._kept:
                _, found[key] = self._kept[key]
                self._kept[key] = (now, found[key])
                self._kept.move_to_end(key)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        to_load = [key for key in missing if key not in self._loading]
        if to_load:
            task = asyncio.create_task(self._load_all(to_load), name="cache-load")
            self._loading.update(dict.fromkeys(to_load, task))
            task.add_done_callback(partial(self._loaded, to_load))
        for task in {self._loading[key] for key in missing}:
            found |= await asyncio.shield(task)
        return [found[key] for key in keys]

    async def _load_all(self, keys: Sequence[str]) -> dict[str, V]:
        return dict(zip(keys, await self._load(keys), strict=True))

    def _loaded(self, keys: Sequence[str], task: asyncio.Task[dict[str, V]]) -> None:
        for key in keys:
            del self._loading[key]
        if not task.cancelled() and task.exception() is None:
            for key, value in task.result().items():
                self._keep(key, value)

    def _keep(self, key: str, value: V) -> None:
        size = self._size_bytes(value)
        if size > self._most_bytes:
            return
        now = self._clock()
        self._kept[key] = (now, value)
        self._bytes += size
        while self._bytes > self._most_bytes or self._oldest() < now - self._idle_seconds:
            _, (_, value) = self._kept.popitem(last=False)
            self._bytes -= self._size_bytes(value)

    def _oldest(self) -> float:
        """Returns when the least recently used value was last used."""
        return next(iter(self._kept.values()))[0]
