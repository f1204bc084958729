"""A programming problem, independent of its data set."""

from __future__ import annotations

from dataclasses import dataclass

MAX_INSTRUCTION_CHARACTERS = 4000
Pair = dict[str, str]
"""A test of a whole program: `input` and `output`."""
Test = str | Pair
"""An assert on a function, or a pair for a program."""


@dataclass(frozen=True)
class Problem:
    """A function or a whole program to be written.

    Args:
        entry_point: the function's name; "": a program that reads and prints.
        tests: asserts that can be taken apart, or pairs, in the data set's order.
        code: a reference that passes them, None where the row has none.
        output: a full answer, as a model would give it, None if the row has none.
        preamble: definitions that the program may rely on.
        visible: number of tests, from the first, that the model's tools have.
        left_out: number of the row's tests that cannot be judged and are left out.
        seconds: CPU seconds of a program for one pair; None: the default.
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
