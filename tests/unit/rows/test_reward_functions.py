"""Reward functions in the signatures of TRL and verifiers, and plain ones, are called as there; the
page that shows one environment for several frameworks is true where a program can tell."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from envserver import Environment, Result, Score, ScorerError

ROW = {"prompt": "What is 2 + 3?", "answer": "5", "level": 2}
TALK = {**ROW, "prompt": [{"role": "user", "content": "What is 2 + 3?"}]}
SAID = [{"role": "assistant", "content": "5"}]


def score(reward: Any, row: dict[str, Any] = ROW, said: str = "5", **settings: Any) -> Score:
    made = Environment.from_rows([row], reward=reward, **settings)()
    (task,) = made.tasks("train")
    value = made.score(task, Result(output=said))
    if isinstance(value, Score):
        return value

    async def awaited() -> Score:
        return await value

    return asyncio.run(awaited())


def test_functions_of_trl_get_lists_of_one() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        seen.update(columns, prompts=prompts, completions=completions)
        columns["log_metric"]("seen", 1.0)
        return [0.5]

    given = score(reward)
    assert given.reward == 0.5 and given.metrics == {"seen": 1.0}
    assert seen["prompts"] == ["What is 2 + 3?"] and seen["completions"] == ["5"]
    assert seen["answer"] == ["5"] and seen["level"] == [2]
    assert score(reward, TALK).components == {"reward": 0.5}
    assert seen["prompts"] == [TALK["prompt"]] and seen["completions"] == [SAID]


def test_an_annotation_says_whether_completions_are_texts() -> None:
    def messages(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [float(one[0]["content"]) / 10 for one in completions]

    def texts(completions: list[str], **_: Any) -> list[float]:
        return [float(one) / 10 for one in completions]

    for row in (ROW, TALK):
        assert score(messages, row).reward == score(texts, row).reward == 0.5


def test_functions_of_verifiers_and_plain_ones_get_what_they_name() -> None:
    def verifiers(completion: Any, answer: str, state: dict[str, Any], level: int) -> float:
        assert completion == SAID and state["answer"] == answer and level == 2
        assert not state["is_truncated"] and state["completion"] == SAID
        return 1.0

    def parsed(parser: Any, completion: Any, answer: str) -> float:
        return float(parser.parse_answer(completion) == answer)

    async def plain(answer: str, output: str) -> bool:
        return answer == output

    class Rubric:
        """As `verifiers.MathRubric`: its functions are called with its parser."""

        class parser:
            @staticmethod
            def parse_answer(completion: Any) -> str:
                return f"of the rubric: {completion[-1]['content']}"

        def of_rubric(self, parser: Any, completion: Any, **_: Any) -> float:
            return float(parser.parse_answer(completion) == "of the rubric: 5")

    components = score([verifiers, plain, parsed, Rubric().of_rubric]).components
    assert components == {"verifiers": 1.0, "plain": 1.0, "parsed": 1.0, "of_rubric": 1.0}
    assert score({verifiers: 1.0, plain: -0.5}).reward == 0.5
    made = Environment.from_rows([ROW], reward={verifiers: 1.0, plain: -0.5})()
    assert made.reward_range == (-0.5, 1.0)


def test_none_leaves_a_function_out_as_in_trl() -> None:
    def none(completions: Any, **_: Any) -> list[None]:
        return [None]

    def half(answer: str, output: str) -> float:
        return 0.5

    assert score([(none, 2.0), (half, 1.0)]).reward == 0.5
    assert score(none).reward is None  # not scorable: dropped, never a reward of 0


def test_what_a_function_may_not_do_is_said() -> None:
    def asks(solution: str, output: str) -> float:
        return 1.0

    def words(output: str) -> str:
        return "1.0"

    def two(completions: Any) -> list[float]:
        return [1.0, 1.0]

    def tokens(completion_ids: Any) -> list[float]:
        return [float(len(completion_ids[0]))]

    for function, message in (
        (asks, "'asks' asks for solution; there are answer, "),
        (words, "returned '1.0', not a number"),
        (two, "not a list with one reward"),
        (tokens, "asks for completion_ids"),
    ):
        with pytest.raises(ScorerError, match=message):
            score(function)
    assert score(asks, columns={"solution": "answer"}).reward == 1.0


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
