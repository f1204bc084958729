"""Environments of verifiers and Atropos, rebuilt in few lines: what they pay for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import envserver
from envserver import Environment, Result, Score
from envserver.registry import find

REBUILT = Path(__file__).parents[3] / "docs" / "rebuilt"
CHOICE = "2 + 2?\nA) 3\nB) 4"
ROWS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "reverse_text": (
        {"prompt": "abcd"},
        {"<reversed_text>dcba</reversed_text>": 1.0, "dcba": 0.0, "": 0.0},
    ),
    "gsm8k": (
        {"question": "900 + 100?", "answer": "It is 1,000.\n#### 1,000"},
        {"So\n#### 1000": 1.0, "1000": 0.0, "#### 1001": 0.0, "": 0.0},
    ),
    "multiple_choice": (
        {"prompt": CHOICE, "ground_truth": "B", "answer": 1},
        {
            "The answer is (B).": 1.0,
            "<think>The answer is A?</think>The answer is B": 1.0,
            "The answer is A. The answer is B.": 0.0,
            "B": 0.0,
        },
    ),
}
"""A row as its data set has it, and rewards of answers."""


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_paid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, rewards = ROWS[name]
    kind: Any = find(str(REBUILT / f"{name}.py"))
    monkeypatch.setattr(kind, "source", Environment.from_rows([row]).source)
    environment = kind()
    (task,) = environment.tasks("train")
    for output, reward in rewards.items():
        assert environment.score(task, Result(output=output)).reward == reward, output


def test_the_glossary_is_paid() -> None:
    environment = find(str(REBUILT / "glossary.py"))()
    for task in environment.tasks("train"):
        known = list(environment.known_results(task))
        outputs = [task.hidden["fact"], *(one.result.output for one in known)]
        scores = [environment.score(task, Result(output=output)) for output in outputs]
        assert [one.reward for one in scores if isinstance(one, Score)] == [1.0, 0.0]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    message = {"role": "user", "content": "1 + 2?"}
    row = {"messages": [message], "tools": [tool], "calls": [["add", {"a": 1, "b": 2}]]}
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def test_calls_are_paid(calls: Path) -> None:
    kind = find(str(REBUILT / "tool_calls.py"))
    environment = kind(kind.Config(rows=calls))
    (task,) = environment.tasks("train")
    assert "calls" not in task.public
    for output, reward in (
        ([["add", '{"b": 2, "a": 1}']], 1.0),
        ([["add", '{"a": 1}']], 0.0),
        ([["add", '{"a": 1']], 0.0),
        ([], 0.0),
    ):
        score = environment.score(task, Result(output=output))
        assert isinstance(score, Score) and score.reward == reward


@pytest.mark.thorough  # processes
@pytest.mark.parametrize("solved", [1.0, 0.0])
def test_right_plays_are_paid_and_spoiled_ones_are_not(calls: Path, solved: float) -> None:
    for name, env in (("glossary", {}), ("tool_calls", {"rows": str(calls)})):
        (group,) = envserver.process(
            str(REBUILT / f"{name}.py"),
            model="sim",
            env={"total_steps": 1, "group_size": 1, **env},
            sim={"solve_probability": solved, "latency_seconds": 0},
            rollouts={"min_group_size": 1},
        ).groups
        assert group.trajectories[0].score.reward == solved
