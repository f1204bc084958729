"""Keys and values of all running answers, attention over them, and a cache of prefixes.

One padded block per layer, one slot per answer. Slot `s` holds its tokens at 0, 1, ...; what
follows them is masked and overwritten. Slots 0 to n - 1 are in use without gaps, so a step reads
views and copies nothing. The block grows as needed; an answer moves only to close a gap.

Attention is registered with transformers under NAME. With one query per row (a decoding step) it
computes two batched products over the heads that share keys, without copying the keys for each
head; with more (a prompt) it calls torch's fused attention. Cached prefixes belong to one set of
weights and one adapter, so a change of weights clears them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from envserver_records.errors import ConfigError
from torch.nn import functional
from transformers import AttentionInterface

if TYPE_CHECKING:
    from .weights import Adapter


NAME = "envserver_slots"
_FOREIGN = ("s_aux", "position_bias")
"""Inputs of attention that some models need and that are not supported here."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention with the signature of transformers' attention functions.

    query [rows, heads, queries, size] and keys, values [rows, shared heads, length, size] -> [rows,
    queries, heads, size]. `attention_mask`: [rows, 1, queries, length], true where a query may
    attend.
    """
    if any(kwargs.get(name) is not None for name in _FOREIGN):
        raise ConfigError("The local engine does not support this model's attention.", hint=OTHERS)
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1 or softcap is not None:
        return _by_products(query, key, value, attention_mask, scale, softcap), None
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2), None


def _by_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    rows, heads, queries, size = query.shape
    shared = key.shape[1]
    # Heads that share keys are treated as further queries of the same head.
    grouped = (query * scale).reshape(rows, shared, heads // shared * queries, size)
    scores = torch.matmul(grouped, key.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(rows, heads, queries, -1)
    scores.masked_fill_(mask.logical_not(), float("-inf"))
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    out = torch.matmul(weights.view(rows, shared, heads // shared * queries, -1), value)
    return out.view(rows, heads, queries, size).transpose(1, 2)


OTHERS = "Serve it with vLLM: envserver models start NAME --backend vllm."

AttentionInterface.register(NAME, attend)


_LENGTH_STEP = 128
_SLOT_STEP = 8


class Place:
    """Where a pass writes and reads: slots `first` to `first + count`, at `positions`.

    `positions`: [count, queries], of the tokens to write. `length`: number of places to read.
    """

    def __init__(self, first: int, positions: torch.Tensor, length: int) -> None:
        count = positions.shape[0]
        self.slots = slice(first, first + count)
        self.rows = torch.arange(first, first + count, device=positions.device)[:, None]
        self.positions = positions
        self.length = length


class SlotCache:
    """The cache of a model with `layers` layers, as transformers' attention asks for one."""

    def __init__(self, layers: int) -> None:
        self.place: Place | None = None
        self._slots = self._length = 0
        self._blocks: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers
        """Keys and values by layer, each [slots, heads, length, size]; None until first used."""

    def make_room(self, slots: int, length: int) -> None:
        if slots <= self._slots and length <= self._length:
            return
        if slots > self._slots:
            self._slots = _up(max(slots, 2 * self._slots), _SLOT_STEP)
        if length > self._length:
            # The longest answer grows for long: growing by half avoids most of the copies.
            self._length = _up(max(length, self._length * 3 // 2), _LENGTH_STEP)
        for layer, block in enumerate(self._blocks):
            if block is not None:
                keys, values = block
                self._blocks[layer] = self._grown(keys), self._grown(values)

    def move(self, source: int, target: int, length: int) -> None:
        for block in self._blocks:
            for part in block or ():
                part[target, :, :length] = part[source, :, :length]

    def taken(self, slot: int, length: int) -> list[torch.Tensor]:
        """A copy of a slot's first `length` places: [2, heads, length, size] per layer; empty if
        nothing was ever written."""
        return [
            torch.stack([part[slot, :, :length] for part in block])
            for block in self._blocks
            if block is not None
        ]

    def put(self, slot: int, taken: list[torch.Tensor], length: int) -> None:
        for layer, old in enumerate(taken):
            keys, values = self._block(layer, old[0], old[1])
            keys[slot, :, :length] = old[0, :, :length]
            values[slot, :, :length] = old[1, :, :length]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the states [rows, heads, queries, size] of a pass; returns all that its rows
        attend to."""
        place = self.place
        assert place is not None
        keys, values = self._block(layer_idx, key_states, value_states)
        keys[place.rows, :, place.positions] = key_states.transpose(1, 2)
        values[place.rows, :, place.positions] = value_states.transpose(1, 2)
        return keys[place.slots, :, : place.length], values[place.slots, :, : place.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Required by transformers; unused, since positions are always passed."""
        return 0 if self.place is None else self.place.length

    def _block(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        block = self._blocks[layer]
        if block is None:
            block = self._blocks[layer] = self._empty(keys), self._empty(values)
        return block

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not uninitialised memory: masked values are multiplied by 0 and must not be NaN.
        return like.new_zeros((self._slots, like.shape[-3], self._length, like.shape[-1]))

    def _grown(self, part: torch.Tensor) -> torch.Tensor:
        grown = self._empty(part)
        grown[: part.shape[0], :, : part.shape[2]] = part
        return grown


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


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
        """The states of the longest cached prefix of `ids`, and its length in tokens."""
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
        self._kept.clear()
        self._by_block.clear()
        self.bytes = 0

    def _longest(self, blocks: list[int]) -> int | None:
        return next(
            (self._by_block[block] for block in reversed(blocks) if block in self._by_block), None
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
        """The length of the common prefix in tokens; 0 for different adapters."""
        if other.adapter is not self.adapter:
            return 0
        count = min(len(other.ids), len(self.ids))
        differing = np.flatnonzero(other.ids[:count] != self.ids[:count])
        return int(differing[0]) if differing.size else count
