"""Keys and values of all running answers: one padded block a layer, one slot an answer.

Slot `s` holds its tokens at 0, 1, ...; what lies behind them is masked and overwritten. Slots
0 to n - 1 are in use and nothing in between is free, so that a step reads views and copies nothing.
The block grows as slots and lengths need it, and never moves an answer but on purpose.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_LENGTH_STEP = 128
_SLOT_STEP = 8


class Place:
    """Where a pass writes and reads: slots `first` to `first + count`, at `positions`.

    Args:
        positions: [count, queries], of the tokens that go in.
        length: so many places are read.
    """

    def __init__(self, first: int, positions: torch.Tensor, length: int) -> None:
        count = positions.shape[0]
        self.slots = slice(first, first + count)
        self.rows = torch.arange(first, first + count, device=positions.device)[:, None]
        self.positions = positions
        self.length = length


class SlotCache(Cache):
    """The cache of a model with `layers` layers."""

    def __init__(self, layers: int) -> None:
        self.place: Place | None = None
        self.slots = 0
        self.length = 0
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    def make_room(self, slots: int, length: int) -> None:
        """There are at least so many slots of at least so many places afterwards."""
        if slots > self.slots:
            self.slots = -(-max(slots, 2 * self.slots) // _SLOT_STEP) * _SLOT_STEP
        if length > self.length:
            # A longest answer grows for long: half as much again spares it most of the copies.
            wanted = max(length, self.length * 3 // 2)
            self.length = -(-wanted // _LENGTH_STEP) * _LENGTH_STEP
        for layer in self.layers:
            layer.resize(self.slots, self.length)

    def move(self, source: int, target: int, length: int) -> None:
        """The first `length` places of one slot, into another."""
        for layer in self.layers:
            for block in (layer.keys, layer.values):
                if block is not None:
                    block[target, :, :length] = block[source, :, :length]

    def taken(self, slot: int, length: int) -> list[torch.Tensor]:
        """A copy of the first `length` places of a slot: one [2, heads, length, size] a layer."""
        return [
            torch.stack([layer.keys[slot, :, :length], layer.values[slot, :, :length]])
            for layer in self.layers
        ]

    def put(self, slot: int, taken: list[torch.Tensor], length: int) -> None:
        """The first `length` places of what was taken, into a slot."""
        for layer, block in zip(self.layers, taken, strict=True):
            layer.hold(block[0])
            layer.keys[slot, :, :length] = block[0, :, :length]
            layer.values[slot, :, :length] = block[1, :, :length]

    @property
    def bytes_held(self) -> int:
        """Of memory."""
        blocks = [block for layer in self.layers for block in (layer.keys, layer.values)]
        return sum(block.nbytes for block in blocks if block is not None)


class _Layer(CacheLayerMixin):
    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner
        self.is_sliding = False

    def resize(self, slots: int, length: int) -> None:
        if self.keys is None or (self.keys.shape[0] == slots and self.keys.shape[2] == length):
            return
        self.keys, self.values = (
            _resized(block, slots, length) for block in (self.keys, self.values)
        )

    def hold(self, like: torch.Tensor) -> None:
        """Makes the blocks for states like [..., heads, length, size], if there are none yet."""
        if self.keys is None:
            shape = (self._owner.slots, like.shape[-3], self._owner.length, like.shape[-1])
            # Zeros, not whatever was there: what is masked is multiplied by 0, and may be no NaN.
            self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.hold(key_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = self._owner.place
        assert place is not None
        self.hold(key_states)
        self.keys[place.rows, :, place.positions] = key_states.transpose(1, 2)
        self.values[place.rows, :, place.positions] = value_states.transpose(1, 2)
        return (
            self.keys[place.slots, :, : place.length],
            self.values[place.slots, :, : place.length],
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.length, 0

    def get_seq_length(self) -> int:
        return 0 if self._owner.place is None else self._owner.place.length

    def get_max_length(self) -> int:
        return -1


def _resized(block: torch.Tensor, slots: int, length: int) -> torch.Tensor:
    grown = block.new_zeros((slots, block.shape[1], length, block.shape[3]))
    slots, length = min(slots, block.shape[0]), min(length, block.shape[2])
    grown[:slots, :, :length] = block[:slots, :, :length]
    return grown
