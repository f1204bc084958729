"""The patch grids of images, from what vLLM renders for a request. Pure but for its memory."""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from .base import ChatAnswer

Grid = tuple[int, ...]
_NAME = "image_grid_thw"
_MOST_GRIDS = 4096
_INTEGERS = ("int32", "int64")


class Grids:
    """The grids of the images that were rendered last, by their SHA-256."""

    def __init__(self) -> None:
        self._grids: OrderedDict[str, Grid] = OrderedDict()

    def lack(self, digests: Sequence[str]) -> bool:
        """Whether the grid of any of these images is unknown."""
        return any(digest not in self._grids for digest in digests)

    def learn(self, digests: Sequence[str], rendered: ChatAnswer) -> None:
        """Remembers the grids in a rendered request of these images; () where it says none."""
        told = _items(rendered.get("features"), len(digests))
        for digest, item in zip(digests, told, strict=True):
            self._grids[digest] = _grid(item)
        while len(self._grids) > _MOST_GRIDS:
            self._grids.popitem(last=False)

    def of(self, digests: Sequence[str]) -> list[Grid]:
        """Returns the grid of each image; () if it is unknown."""
        return [self._grids.get(digest, ()) for digest in digests]


def _items(features: Any, count: int) -> list[Any]:
    """Returns vLLM's serialised facts for each image: without pixels, if it gives those."""
    for name in ("mm_metadata", "kwargs_data"):
        told = features.get(name) if isinstance(features, dict) else None
        items = told.get("image") if isinstance(told, dict) else None
        if isinstance(items, list) and len(items) == count and all(items):
            return items
    return [None] * count


def _grid(item: Any) -> Grid:
    """Reads the grid from an item: base64 of MessagePack, {name: {"data": (dtype, shape, bytes)}}.

    An engine of another version may write it otherwise; trainers compute it from the image then.
    """
    if not isinstance(item, str):
        return ()
    try:
        kind, _, raw = msgspec.msgpack.decode(base64.b64decode(item))[_NAME]["data"]
        if kind not in _INTEGERS:
            return ()
        return tuple(np.frombuffer(raw.data, kind).tolist())
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, msgspec.DecodeError):
        return ()
