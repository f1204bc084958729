"""Which stream of groups a runner gets: that of its seed, or of the next one that nobody uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from ...remote.messages import Registration
from ...rollouts.stream import stream_prefix
from ...store import GroupStore

_MOST_HINTS: Final = 4096


class Streams:
    """The streams of all runners. What holds: no two runners have the same one."""

    def __init__(self, store: GroupStore) -> None:
        self._store = store
        self._taken: Counter[str] = Counter()
        """ID prefixes of the streams that runners have."""
        self._next_seeds: dict[tuple[str, str, int], int] = {}
        """By environment, split and requested seed: all seeds from that one to this are taken."""

    async def choose(self, wanted: Registration, others: Collection[str]) -> int:
        """Returns the requested seed, or the next one whose stream nobody has used, and takes its
        stream.

        Args:
            others: ID prefixes of the streams of the server's own environments.
        """
        asked = wanted.env, wanted.split, wanted.seed
        seed = self._next_seeds.get(asked, wanted.seed)
        while not await self._took(stream_prefix(*asked[:2], seed), others):
            seed += 1
        if len(self._next_seeds) >= _MOST_HINTS:
            self._next_seeds.clear()
        self._next_seeds[asked] = max(seed, self._next_seeds.get(asked, seed))
        return seed

    async def _took(self, prefix: str, others: Collection[str]) -> bool:
        if prefix in self._taken or prefix in others:
            return False
        self.take(prefix)  # before the question: others may register meanwhile
        if await self._store.count_with_prefix(prefix):
            self.give_back(prefix)
            return False
        return True

    def take(self, prefix: str) -> None:
        """Notes that a runner has this stream."""
        self._taken[prefix] += 1

    def give_back(self, prefix: str) -> None:
        """Notes that a runner no longer has this stream."""
        self._taken[prefix] -= 1
        if self._taken[prefix] <= 0:
            del self._taken[prefix]
