"""Copies a model's tensors into buckets of bounded size, on the CPU, ready to be sent.

In: names and tensors. Out: buckets with the SHA-256 of their bytes. What always holds: the tensors
are walked exactly once, so that the ranks of a sharded model stay in step whatever an engine does;
a bucket keeps its bytes, so that an engine that restarts gets the published weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from envserver_records import InputError

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors = Iterable[tuple[str, "Tensor"]]
ALIGNMENT: Final = 16
"""Each tensor of a bucket begins at a multiple of so many bytes (as engines expect)."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together.

    Args:
        payload: uint8[N]: the tensors' bytes, each padded to a multiple of ALIGNMENT.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    payload: Tensor
    sha256: str

    @property
    def about(self) -> dict[str, Any]:
        """Names, dtypes and shapes, by which an engine unpacks it."""
        return {"names": self.names, "dtype_names": self.dtype_names, "shapes": self.shapes}

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors, which share the bucket's memory."""
        import torch

        offset = 0
        for dtype_name, shape in zip(self.dtype_names, self.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            yield self.payload[offset : offset + size].view(dtype).view(shape)
            offset += _padded(size)


def packed(tensors: NamedTensors, most_bytes: int) -> list[Bucket]:
    """Returns the tensors in buckets of at most `most_bytes`; a larger tensor has its own.
    Raises InputError: there is none.
    """
    buckets: list[Bucket] = []
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        more = _padded(tensor.numel() * tensor.element_size())
        if waiting and size + more > most_bytes:
            buckets.append(_bucket(waiting, size))
            waiting, size = [], 0
        waiting.append((name, tensor.detach()))
        size += more
    if not waiting:
        raise InputError("There are no weights to send.")
    return [*buckets, _bucket(waiting, size)]


def _bucket(named: list[tuple[str, Tensor]], size: int) -> Bucket:
    import torch

    payload = torch.zeros(size, dtype=torch.uint8)
    offset = 0
    for _, tensor in named:
        taken = tensor.numel() * tensor.element_size()
        if taken:
            here = payload[offset : offset + taken].view(tensor.dtype)
            here.copy_(tensor.reshape(-1))
        offset += _padded(taken)
    return Bucket(
        [name for name, _ in named],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        [list(tensor.shape) for _, tensor in named],
        payload,
        hashlib.sha256(payload.numpy()).hexdigest(),
    )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
