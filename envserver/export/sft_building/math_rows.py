"""Problems with worked solutions (XenArcAI/MathX-5M): a tutor's conversation, or why it is none.

Whether the solution's boxed answer is the expected one says the environment `math`, where rows are
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
    """The example of `row`, or why it is dropped."""
    problem, solution = _text(row, _PROBLEM), _text(row, _SOLUTION)
    if problem is None:
        return "no problem"
    if solution is None:
        return "no solution"
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]
    return Example(asked, solution, row, {})


def _text(row: Json, names: tuple[str, ...]) -> str | None:
    """The first of these that says something."""
    found = (row.get(name) for name in names)
    return next((text.strip() for text in found if isinstance(text, str) and text.strip()), None)
