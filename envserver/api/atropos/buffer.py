"""Selects the buffered groups of an environment that are queued together. Pure: sizes in, indices
out.

An environment may post a group in parts. Parts wait until some of them add up to exactly its group
size.
"""

from __future__ import annotations

from collections.abc import Sequence


def groups_summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """Returns ascending indices of sizes that add up to exactly `target`; empty if there are none.

    Tries greedily from the oldest, skipping what does not fit; if that fails, finds any subset that
    fits, preferring the oldest parts. Sizes are positive.
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
    if target <= 0 or sum(sizes) < target:
        return []
    # reachable[i]: the sums up to target that sizes[i:] can make.
    reachable: list[set[int]] = [{0}]
    for size in reversed(sizes):
        sums = reachable[-1]
        reachable.append(sums | {total + size for total in sums if total + size <= target})
    reachable.reverse()
    if target not in reachable[0]:
        return []
    taken: list[int] = []
    room = target
    for index, size in enumerate(sizes):
        if room - size in reachable[index + 1]:
            taken.append(index)
            room -= size
    return taken
