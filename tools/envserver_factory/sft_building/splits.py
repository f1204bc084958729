"""Splits rows into training and held-out parts. Pure, deterministic in the seed.

Every row is in exactly one part, except for `split_tool` without `strict`, whose only row is in
both. Orders come from one `random.Random(seed)` over lists in reading order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """The rows of one tool, by part."""

    train: list[int]
    val: list[int]


class Three(NamedTuple):
    """Row numbers by part."""

    train: list[int]
    validation: list[int]
    test: list[int]


def split_three(
    count: int, *, seed: int, val_ratio: float = 0.10, test_ratio: float = 0.05
) -> Three:
    """Shuffles the numbers of `count` rows: first train, then validation, test last."""
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
    """Shuffles the row numbers of each tool: the first ones are held out, at least one.

    Args:
        counts: rows by tool, in the order in which the tools first appear: one random generator
            shuffles them one after the other.
        strict: a tool's only row is for training; else it is in both parts.
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
    """Splits by groups of rows: a group (a task) is held out for all tools, or for none.

    Every tool with several groups has rows in both parts wherever possible; a tool with one group
    is for training.

    Args:
        groups: for each tool, in the order in which the tools first appear, the group of each row.
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
    """Returns the held-out groups; each tool keeps one for training."""
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
