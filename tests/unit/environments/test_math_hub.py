"""The data sets of `math` through the real library `datasets`, on tiny copies of their shapes.

A folder with the hub's id as its path stands for the hub: `load_dataset` looks there first.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.math.env import Math
from envserver_environments.math.loading import HUBS

from envserver import Result

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "gsm8k": ({"question": "A pen costs 3. Four?", "answer": "4*3=12\n#### 12"}, "12"),
    "math": (
        {"problem": "Simplify.", "level": "Level 1", "type": "Algebra", "solution": "\\boxed{x+1}"},
        "x+1",
    ),
    "math500": (
        {
            "problem": "Find it.", "solution": "It is \\boxed{7}.", "answer": "7",
            "subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json",
        },
        "7",
    ),
    "svamp": (
        {
            "ID": "chal-1", "Body": "Tim has 8 nuts.", "Question": "He eats 3. How many are left?",
            "Equation": "( 8.0 - 3.0 )", "Answer": "5.0", "Type": "Subtraction",
        },
        "5",
    ),
    "mawps": (
        {
            "id": "mawps__1", "question": "2 and 3 make?", "chain": "", "result": "5",
            "result_float": 5.0, "equation": "X = 2 + 3", "expression": "2 + 3",
        },
        "5",
    ),
    "mathqa": (
        {
            "Problem": "half of 8 ?", "Rationale": "",
            "options": "a ) 1 , b ) 2 , c ) 4 , d ) 5 , e ) 6",
            "correct": "c", "annotated_formula": "", "linear_formula": "", "category": "general",
        },
        "C",
    ),
    "aqua": (
        {
            "question": "Twice 9?", "options": ["A)21", "B)18", "C)9", "D)2", "E)81"],
            "rationale": "", "correct": "B",
        },
        "B",
    ),
    "aime": ({"problem": "Find the remainder.", "answer": "033"}, "33"),
    "deepmath": ({"question": "What is it?", "final_answer": "\\frac{1}{2}"}, "\\frac{1}{2}"),
    "mathx": (
        {"problem": "How many?", "generated_solution": "...", "expected_answer": "42"},
        "42",
    ),
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which hub ids are looked up, and an empty cache."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.mark.parametrize("data_set", sorted(HUBS))
def test_rows_of_the_hub_become_tasks_that_their_answers_solve(
    hub: Path, data_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HUBS[data_set]
    row, answer = ROWS[data_set]
    split = "train" if "train" in source.splits else "test"
    if data_set == "mathqa":
        for name, address in zip_of(hub, row, source.arguments["data_files"]).items():
            monkeypatch.setitem(source.arguments["data_files"], name, address)
    else:
        put_folder(hub / source.path, row, source.configs, source.splits[split])
    environment = Math(Math.Config(data_set=data_set, split=split))
    tasks = list(environment.tasks(split))
    assert len(tasks) == len(source.configs)
    for task in tasks:
        assert answer not in json.dumps(task.public.get("answer", ""))
        result = Result(output={"answer": answer, "text": ""})
        assert environment.score(task, result).reward == 1.0
        wrong = Result(output={"answer": "A" if answer != "A" else "B", "text": ""})
        assert environment.score(task, wrong).reward == 0.0


def put_folder(
    folder: Path, row: dict[str, Any], configs: tuple[str | None, ...], split: str
) -> None:
    """A data set of one row per configuration, declared as the hub's are."""
    names = [config or "default" for config in configs]
    declared = []
    for name in names:
        data = folder / name / f"{split}.jsonl"
        data.parent.mkdir(parents=True)
        data.write_text(json.dumps(row) + "\n")
        declared.append(
            f"- config_name: {name}\n  data_files:\n"
            f"  - split: {split}\n    path: {name}/{split}.jsonl\n"
        )
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(declared)}---\n")


def zip_of(folder: Path, row: dict[str, Any], data_files: dict[str, str]) -> dict[str, str]:
    """Makes the zip that MathQA comes in; `data_files` with the copy's address."""
    archive = folder / "MathQA.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for split in ("train", "dev", "test"):
            file.writestr(f"{split}.json", json.dumps([row]))
    return {
        split: f"{address.partition('::')[0]}::{archive}" for split, address in data_files.items()
    }
