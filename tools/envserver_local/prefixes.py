"""A prefix cache: keys and values of finished answers, for prompts that begin with the same tokens.

A conversation continues its last prompt and answer, and the rollouts of a group share a prompt:
both reuse earlier computations. Entries belong to one set of weights and one adapter, so a change
of weights clears the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .adapters import Adapter

_MOST_BYTES = 512 * 2**20
_BLOCK = 16
"""Tokens per block: prefixes are looked up in such steps; computing fewer is faster than copying.
"""


class Prefixes:
    """The cache, bounded in bytes; evicts the least recently used entry first."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._by_block: dict[int, int] = {}
        """Hash of a prefix of whole blocks -> key of the entry stored last for it."""
        self._most_bytes = most_bytes
        self._next = 0
        self.bytes = 0
        self.asked = self.found = 0
        """Prompt tokens looked up, and those found in the cache."""

    def keep(self, ids: list[int], adapter: Adapter | None, taken: list[torch.Tensor]) -> None:
        """Stores the states of `ids`, and drops the entry that they extend."""
        kept = _Kept(np.array(ids, dtype=np.int64), adapter, taken)
        if not kept.blocks or kept.bytes > self._most_bytes:
            return
        before = self._longest(kept.blocks)
        if before is not None and self._kept[before].shared(kept) == len(self._kept[before].ids):
            self._drop(before)
        self._kept[self._next] = kept
        self._by_block.update(dict.fromkeys(kept.blocks, self._next))
        self._next += 1
        self.bytes += kept.bytes
        while self.bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def find(
        self, ids: list[int], adapter: Adapter | None
    ) -> tuple[list[torch.Tensor], int] | None:
        """Returns the states of the longest cached prefix of `ids`, and its length in tokens."""
        self.asked += len(ids)
        if not self._kept:
            return None
        wanted = _Kept(np.array(ids, dtype=np.int64), adapter, [])
        key = self._longest(wanted.blocks)
        if key is None:
            return None
        length = self._kept[key].shared(wanted)
        if length < _BLOCK:
            return None
        self._kept.move_to_end(key)
        self.found += length
        return self._kept[key].taken, length

    def clear(self) -> None:
        """Drops all entries."""
        self._kept.clear()
        self._by_block.clear()
        self.bytes = 0

    def _longest(self, blocks: list[int]) -> int | None:
        return next(
            (self._by_block[one] for one in reversed(blocks) if one in self._by_block), None
        )

    def _drop(self, key: int) -> None:
        kept = self._kept.pop(key)
        self.bytes -= kept.bytes
        for block in kept.blocks:
            if self._by_block.get(block) == key:
                del self._by_block[block]


class _Kept:
    def __init__(self, ids: np.ndarray, adapter: Adapter | None, taken: list[torch.Tensor]) -> None:
        self.ids = ids
        self.adapter = adapter
        self.taken = taken
        self.bytes = sum(block.nbytes for block in taken)
        self.blocks: list[int] = []
        chain = id(adapter)
        for start in range(0, len(ids) - _BLOCK + 1, _BLOCK):
            chain = hash((chain, ids[start : start + _BLOCK].tobytes()))
            self.blocks.append(chain)

    def shared(self, other: _Kept) -> int:
        """Returns the length of the common prefix in tokens; 0 for different adapters."""
        if other.adapter is not self.adapter:
            return 0
        count = min(len(other.ids), len(self.ids))
        differing = np.flatnonzero(other.ids[:count] != self.ids[:count])
        return int(differing[0]) if differing.size else count
