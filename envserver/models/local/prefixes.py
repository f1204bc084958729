"""A prefix cache: keys and values of finished answers, for prompts that begin with the same tokens.

A conversation continues its last prompt and answer, and the rollouts of a group share a prompt:
both
reuse what was computed before. Entries belong to one set of weights and one adapter, so a change of
weights clears the cache.
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
"""Tokens: beginnings are looked for by such steps; fewer are sooner computed than copied."""


class Prefixes:
    """Bounded in bytes; the least lately used goes first."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._by_block: dict[int, int] = {}
        """Hashes of beginnings of whole blocks, with the key of what was kept last of them."""
        self._most_bytes = most_bytes
        self._next = 0
        self.bytes = 0
        self.asked = self.found = 0
        """Tokens of prompts that were looked for here, and those that need not be computed."""

    def keep(self, ids: list[int], adapter: Adapter | None, taken: list[torch.Tensor]) -> None:
        """Keeps what belongs to `ids`; what they go on from is then not needed any more."""
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
        """What is kept of the longest known beginning of `ids`, and its length in tokens."""
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
        """Forgets all."""
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
        """How many ids both begin with; 0 under different adapters."""
        if other.adapter is not self.adapter:
            return 0
        count = min(len(other.ids), len(self.ids))
        differing = np.flatnonzero(other.ids[:count] != self.ids[:count])
        return int(differing[0]) if differing.size else count
