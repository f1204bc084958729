"""Bytes that are made once and kept while there is room, least recently used out first.

What holds: what several ask for at the same time is made once; one who stops waiting, or whose
maker fails, leaves the others what they asked for, or the same error.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """Values by key.

    Args:
        load: makes the values of keys that are not here.
        size_bytes: of one value.
        most_bytes: of all values kept.
    """

    def __init__(
        self,
        load: Callable[[Sequence[str]], Awaitable[Sequence[V]]],
        size_bytes: Callable[[V], int],
        most_bytes: int,
    ) -> None:
        self._load = load
        self._size_bytes = size_bytes
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, V] = OrderedDict()
        self._bytes = 0
        self._loading: dict[str, asyncio.Task[dict[str, V]]] = {}

    async def get(self, keys: Sequence[str]) -> list[V]:
        """The values of `keys`, in this order; raises what `load` raises."""
        found: dict[str, V] = {}
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
                found[key] = self._kept[key]
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
        self._kept[key] = value
        self._bytes += size
        while self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= self._size_bytes(oldest)
