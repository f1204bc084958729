"""Environments whose tasks are dataclasses or structs: the same tasks, scores and runs as dicts."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases_of
from support.commands import envserver, read_jsonl

from envserver import ConfigError, InputError, PublicTask, Result, Score, Task
from envserver.registry import find

CASES = cases_of(__file__)
TYPED = CASES["typed"]


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    path = tmp_path / "typed.py"
    path.write_text(TYPED + CASES["in_a_thread"])
    return path


@pytest.mark.parametrize("row_class", ["Sum", "Struct"])
def test_rows_are_plain_tasks_behind_the_registry(typed: Path, row_class: str) -> None:
    text = TYPED.replace("[Sum]", f"[{row_class}]").replace("row = Sum", f"row = {row_class}")
    typed.write_text(text)
    made = find(f"{typed}:Addition")()
    task = next(iter(made.tasks("train")))
    assert task == Task("sum-0", {"question": "0 + 1?"}, {"answer": 1, "steps": [{"number": 0}]})
    assert made.score(task, Result(output="1")) == Score(reward=1.0)
    assert next(made.known_results(task)).result.output == "1"
    row = {"question": "5 + 1?", "answer": 6, "steps": [{"number": 5}]}
    assert made.score(made.task_from_row(row), Result(output="6")) == Score(reward=1.0)
    with pytest.raises(InputError, match=f"The row is not a {row_class}"):
        made.task_from_row({**row, "answer": "six"})
    assert made.name == "addition" and made.__doc__ == "Add two numbers."


def test_a_worker_gets_no_hidden_field_and_says_so(typed: Path) -> None:
    made: Any = find(f"{typed}:Peeks")()
    public = PublicTask("sum-0", {"question": "0 + 1?"})
    with pytest.raises(AttributeError, match="'answer' is hidden"):
        asyncio.run(made.rollout(public, None))


@pytest.mark.parametrize("name", ["Addition", "InAThread"])
def test_typed_environments_run(typed: Path, name: str) -> None:
    ran = envserver(
        *("process", "--env", f"typed.py:{name}", "--model", "sim", "--out", "out.jsonl"),
        *("--sim.solve_probability", 1, "--env.group_size", 2),
        folder=typed.parent,
    )
    assert ran.returncode == 0, ran.stderr
    assert [group["scores"] for group in read_jsonl(typed.parent / "out.jsonl")] == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("class Row:\n    id: str", "neither a dataclass nor a msgspec struct"),
        ("@dataclasses.dataclass\nclass Row:\n    id: int", "no field `id: str`"),
    ],
)
def test_rows_that_make_no_task_are_refused(tmp_path: Path, row: str, problem: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        f"import dataclasses\nfrom envserver import Environment\n\n{row}\n\n"
        "class Wrong(Environment[Row]):\n"
        "    def tasks(self, split): ...\n"
        "    def rollout(self, task, run): ...\n"
        "    def score(self, task, result): ...\n"
    )
    with pytest.raises(ConfigError, match=problem):
        find(str(path))


@pytest.mark.thorough  # reads all types of the package
def test_mypy_knows_the_fields(tmp_path: Path) -> None:
    wrong = TYPED.replace("task.question", "task.qestion", 1).replace(
        "str(task.answer)))", "task.answer.upper()))"
    )
    (tmp_path / "wrong.py").write_text(wrong)
    (tmp_path / "right.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert '"Sum" has no attribute "qestion"; maybe "question"?' in done.stdout
    assert '"int" has no attribute "upper"' in done.stdout
    assert "right.py" not in done.stdout and done.stdout.count("error:") == 2, done.stdout
