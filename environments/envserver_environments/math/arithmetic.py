"""Generates easy problems, for models trained on a laptop: sums, differences, digits to sort.

Every problem `A+B` and `A-B` whose answer is not negative, with operands up to a bound, comes once,
in an order that depends on the seed only. Lazy: nothing is kept, however large the bound.
So does each of the 9**5 numbers of five digits from 1 to 9, to be sorted. A problem belongs to one
split, whatever the seed and the bound: about 80 % train, 10 % each of the others.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator

from envserver import Split

from .data_sets import Problem

_TRAIN: list[Split] = ["train"] * 8
_SPLITS: list[Split] = [*_TRAIN, "validation", "test"]
DIGITS = 5
_WORDS = {"+": "plus", "-": "minus"}


def problems(max_operand: int, split: Split, seed: int) -> Iterator[tuple[str, Problem]]:
    """Yields (id, problem), each problem of the split once; ids look like `arithmetic-7-plus-5`.

    Args:
        max_operand: largest number in a question; the smallest is 0.
    """
    size = max_operand + 1
    for place in _shuffled(2 * size * size, f"arithmetic-{split}-{seed}"):
        sign, (left, right) = "+-"[place % 2], divmod(place // 2, size)
        if sign == "-" and left < right:
            continue
        task_id = f"arithmetic-{left}-{_WORDS[sign]}-{right}"
        if _split_of(task_id) == split:
            yield task_id, _problem(left, sign, right)


def sorting_problems(split: Split, seed: int) -> Iterator[tuple[str, Problem]]:
    """Yields (id, problem), each problem of the split once; ids look like `sort-41932`."""
    for place in _shuffled(9**DIGITS, f"sorting-{split}-{seed}"):
        number = "".join(str(place // 9**digit % 9 + 1) for digit in range(DIGITS))
        if _split_of(task_id := f"sort-{number}") == split:
            answer = "".join(sorted(number))
            yield task_id, Problem(f"Sort {number}", answer, "number", "sorting")


def _split_of(task_id: str) -> Split:
    """The one split to which a problem belongs."""
    return _SPLITS[zlib.crc32(task_id.encode()) % len(_SPLITS)]


def _problem(left: int, sign: str, right: int) -> Problem:
    return Problem(
        question=f"What is {left}{sign}{right}?",
        answer=str(left + right if sign == "+" else left - right),
        kind="number",
        data_set="arithmetic",
        expression=f"{left}{sign}{right}",
    )


def _shuffled(count: int, seed: str) -> Iterator[int]:
    """Every number below `count` once, without keeping any: steps of one length around a circle."""
    rng = random.Random(seed)
    start = rng.randrange(count)
    step = next(n for n in iter(lambda: rng.randrange(1, count + 1), 0) if math.gcd(n, count) == 1)
    return ((start + step * number) % count for number in range(count))
