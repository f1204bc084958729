"""A programming problem, independent of its data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_INSTRUCTION_CHARACTERS = 4000
Pair = dict[str, str]
"""A test of a whole program: `input` and `output`."""
Test = str | Pair
"""Of a function: an assert; of a program: a pair."""


@dataclass(frozen=True)
class Problem:
    """A function or a whole program to be written.

    Args:
        entry_point: the function's name; "": a program that reads and prints.
        tests: asserts that can be taken apart, or pairs, in the data set's order.
        code: a reference that passes them, None where the row has none.
        output: an answer in full, as a model would give it, None where the row has none.
        preamble: definitions that the program may rely on.
        visible: how many of the tests, from the first, the model's tools have.
        left_out: how many tests of the row are not among `tests`, for they cannot be judged.
        seconds: of CPU that a program has for one pair, None: the usual ones.
    """

    data_set: str
    instruction: str
    entry_point: str
    tests: tuple[Test, ...]
    visible: int
    code: str | None = None
    output: str | None = None
    preamble: str = ""
    left_out: int = 0
    seconds: float | None = None


def text_of(row: dict[str, Any], *keys: str) -> str:
    """The first of the row's fields that is there, "" where it is not text."""
    value = next((row[key] for key in keys if key in row), "")
    return value.strip() if isinstance(value, str) else ""
