"""Converts problems with worked solutions (XenArcAI/MathX-5M) to a tutor's conversations.

Whether the solution's boxed answer is right is judged by the environment `math`, where rows are
verified (`prepare`).
"""

from __future__ import annotations

from typing import Any

from .examples import Example

Json = dict[str, Any]

SYSTEM = (
    "You are an expert mathematics tutor. Work through each problem one step at a time, make your "
    "reasoning clear, and put the final answer in \\boxed{}."
)
_PROBLEM = ("question", "problem", "prompt")
_SOLUTION = ("generated_solution", "solution", "output", "response")


def example_of(row: Json) -> Example | str:
    """Returns the example of `row`, or why it is dropped."""
    problem, solution = _text(row, _PROBLEM), _text(row, _SOLUTION)
    if problem is None:
        return "no problem"
    if solution is None:
        return "no solution"
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]
    return Example(asked, solution, row, {})


def _text(row: Json, names: tuple[str, ...]) -> str | None:
    """Returns the first non-empty field of these."""
    found = (row.get(name) for name in names)
    return next((text.strip() for text in found if isinstance(text, str) and text.strip()), None)
