"""The page that shows one environment for several frameworks is true where a program can tell."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from envserver import Environment, Result, Score

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "side-by-side.md").read_text()
BLOCKS = [ast.parse(text) for text in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)]
REBUILT = re.findall(r"\[(\d+)\]\(((?:rebuilt|recipes)\S+\.py)\)", PAGE)


def definition(name: str) -> Any:
    """The page's function or constant of that name, made by running only its definition."""
    (found,) = (
        node
        for block in BLOCKS
        for node in block.body
        if (isinstance(node, ast.FunctionDef) and node.name == name)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    )
    made: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), "side-by-side.md", "exec"), made)
    return made[name]


@pytest.mark.parametrize("name", ["right", "right_of_verifiers", "right_of_trl"])
def test_reward_functions_of_others_are_ours_as_they_stand(name: str) -> None:
    rows, reward = definition("ROWS"), definition(name)
    environment = Environment.from_rows(rows, prompt="question", reward=reward)()
    for task in environment.tasks("train"):
        for output, paid in ((f"It is {task.hidden['answer']}", 1.0), ("It is -1", 0.0), ("", 0.0)):
            score = environment.score(task, Result(output=output))
            assert isinstance(score, Score) and score.reward == paid


def test_lines_are_counted_right() -> None:
    assert len(REBUILT) == 8
    for lines, name in REBUILT:
        assert _code_lines((ROOT / "docs" / name).read_text()) == int(lines), name


def _code_lines(text: str) -> int:
    """Lines with code: no blank ones, no comments, no docstrings."""
    tree = ast.parse(text)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node) is not None:
                docstrings.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in docstrings
        for number, line in enumerate(text.splitlines(), start=1)
    )
