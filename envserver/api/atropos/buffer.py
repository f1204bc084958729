"""Selects the buffered groups of an environment that are queued together. Pure: sizes in, indices
out.

An environment may post a group in parts. Parts wait until some of them add up to exactly its group
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_MOST_PARTS: Final = 1024
_LARGEST_TARGET: Final = 65_536


def groups_summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """Returns ascending indices of sizes that add up to exactly `target`; empty if there are none.

    Tries greedily from the oldest, skipping what does not fit; if that fails, finds a subset of the
    oldest 1,024 that fits, preferring older parts. Sizes are positive.
    """
    return _greedily(sizes, target) or _by_subset(sizes, target)


def _greedily(sizes: Sequence[int], target: int) -> list[int]:
    taken: list[int] = []
    room = target
    for index, size in enumerate(sizes):
        if size <= room:
            taken.append(index)
            room -= size
            if room == 0:
                return taken
    return []


def _by_subset(sizes: Sequence[int], target: int) -> list[int]:
    """Looks at the oldest parts only, and at no huge target: an environment may post any sizes."""
    sizes = sizes[:_MOST_PARTS]
    if not 0 < target <= _LARGEST_TARGET or sum(sizes) < target:
        return []
    # Bit n of reached[i]: some of sizes[:i] add up to n.
    all_bits = (1 << (target + 1)) - 1
    reached = [1]
    for size in sizes:
        before = reached[-1]
        reached.append(before | (before << size) & all_bits if size <= target else before)
    if not reached[-1] >> target & 1:
        return []
    taken: list[int] = []
    room = target
    for index in reversed(range(len(sizes))):
        if not reached[index] >> room & 1:
            taken.append(index)
            room -= sizes[index]
    return taken[::-1]
