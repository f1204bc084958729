"""Generates numbers whose digits are to be sorted, for models trained on a laptop.

Each of the 9**5 numbers of five digits from 1 to 9 comes once, in an order that depends on the seed
only. A number belongs to one split, whatever the seed: about 80 % train, 10 % each of the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from envserver import Split

from .arithmetic import shuffled, split_of
from .data_sets import Problem

DIGITS = 5


def problems(split: Split, seed: int) -> Iterator[tuple[str, Problem]]:
    """Yields (id, problem), each problem of the split once; ids look like `sort-41932`."""
    for place in shuffled(9**DIGITS, f"sorting-{split}-{seed}"):
        number = "".join(str(place // 9**digit % 9 + 1) for digit in range(DIGITS))
        task_id = f"sort-{number}"
        if split_of(task_id) == split:
            yield task_id, _problem(number)


def _problem(number: str) -> Problem:
    return Problem(
        question=f"Sort {number}",
        answer="".join(sorted(number)),
        kind="number",
        data_set="sorting",
    )
