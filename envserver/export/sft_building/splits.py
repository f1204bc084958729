"""Which rows are trained on and which are held out: pure, the same for the same seed.

Always: every row is in exactly one part, but for `split_tool` without `strict`, whose lone row is
in both. Orders are those of one `random.Random(seed)` over lists in the order of their reading.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """Rows of one tool."""

    train: list[int]
    val: list[int]


class Three(NamedTuple):
    """Numbers of rows."""

    train: list[int]
    validation: list[int]
    test: list[int]


def split_three(
    count: int, *, seed: int, val_ratio: float = 0.10, test_ratio: float = 0.05
) -> Three:
    """The numbers of `count` rows, shuffled: first train, then validation, test last.

    Args:
        val_ratio, test_ratio: shares of the rows, rounded down; the rest is for training.

    Raises:
        ValueError: a share is negative, or nothing would be left to train on.
    """
    if val_ratio < 0 or test_ratio < 0 or val_ratio + test_ratio >= 1:
        raise ValueError(f"{val_ratio} and {test_ratio} leave nothing to train on")
    order = list(range(count))
    random.Random(seed).shuffle(order)
    validation, test = int(count * val_ratio), int(count * test_ratio)
    train = count - validation - test
    return Three(order[:train], order[train : train + validation], order[train + validation :])


def split_tools(
    counts: Mapping[str, int], *, seed: int, val_ratio: float = 0.05, strict: bool = False
) -> dict[str, Held]:
    """Of each tool the numbers of its rows, shuffled: the first are held out, at least one.

    Args:
        counts: rows by tool, in the order in which the tools first appear: one generator of random
            numbers shuffles them one after the other.
        strict: a tool's lone row is trained on; else it is in both parts.
    """
    rng = random.Random(seed)
    held: dict[str, Held] = {}
    for tool, count in counts.items():
        order = list(range(count))
        rng.shuffle(order)
        if count > 1:
            cut = max(1, int(count * val_ratio))
            held[tool] = Held(order[cut:], order[:cut])
        else:
            held[tool] = Held(order, [] if strict else list(order))
    return held


def split_tools_by_group(
    groups: Mapping[str, Sequence[str]], *, seed: int, val_ratio: float = 0.05
) -> dict[str, Held]:
    """The same by groups of rows: a group (a task) is held out of all tools, or of none.

    Every tool of several groups has rows in both parts wherever the groups allow it; a tool of one
    group is trained on.

    Args:
        groups: of each tool, in the order in which the tools first appear, the group of each row.
    """
    rng = random.Random(seed)
    names = list(dict.fromkeys(name for rows in groups.values() for name in rows))
    rng.shuffle(names)
    out = _held_out(names, groups, val_ratio)
    held: dict[str, Held] = {}
    for tool, rows in groups.items():
        order = list(range(len(rows)))
        rng.shuffle(order)
        held[tool] = Held(
            [number for number in order if rows[number] not in out],
            [number for number in order if rows[number] in out],
        )
    return held


def _held_out(
    names: Sequence[str], groups: Mapping[str, Sequence[str]], val_ratio: float
) -> set[str]:
    """The groups that are held out; each tool keeps one to be trained on."""
    tools_of: dict[str, list[str]] = {name: [] for name in names}
    left: dict[str, int] = {}
    for tool, rows in groups.items():
        own = set(rows)
        left[tool] = len(own)
        for name in own:
            tools_of[name].append(tool)
    out: set[str] = set()

    def take(name: str) -> bool:
        if name in out or any(left[tool] < 2 for tool in tools_of[name]):
            return False
        out.add(name)
        for tool in tools_of[name]:
            left[tool] -= 1
        return True

    wanted = max(1, int(len(names) * val_ratio))
    for name in names:
        if len(out) >= wanted:
            break
        take(name)
    for rows in groups.values():
        own = set(rows)
        if not own & out:
            any(take(name) for name in names if name in own)
    return out
