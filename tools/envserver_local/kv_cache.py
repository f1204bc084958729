"""Keys and values of all running answers: one padded block per layer, one slot per answer.

Slot `s` holds its tokens at 0, 1, ...; what follows them is masked and overwritten. Slots 0 to
n - 1 are in use without gaps, so a step reads views and copies nothing. The block grows as needed;
an answer moves only to close a gap.
"""

from __future__ import annotations

from typing import Any

import torch

_LENGTH_STEP = 128
_SLOT_STEP = 8


class Place:
    """Where a pass writes and reads: slots `first` to `first + count`, at `positions`.

    Args:
        positions: [count, queries], positions of the tokens to write.
        length: number of places to read.
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
        """Grows the cache to at least this number of slots and places."""
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
        """Copies the first `length` places of one slot to another."""
        for block in self._blocks:
            for part in block or ():
                part[target, :, :length] = part[source, :, :length]

    def taken(self, slot: int, length: int) -> list[torch.Tensor]:
        """Returns a copy of a slot's first `length` places: [2, heads, length, size] per layer.

        Empty if nothing was ever written.
        """
        return [
            torch.stack([part[slot, :, :length] for part in block])
            for block in self._blocks
            if block is not None
        ]

    def put(self, slot: int, taken: list[torch.Tensor], length: int) -> None:
        """Writes the first `length` places of a copy to a slot."""
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
        """See transformers' Cache; unused, since positions are always passed."""
        return 0 if self.place is None else self.place.length

    def _block(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the layer's block; allocates it for states shaped like these if necessary."""
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
