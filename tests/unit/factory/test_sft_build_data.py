"""`envserver sft router|math|code`: data sets prepared for fine-tuning, and where they are put."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from envserver import main

PLAN = {
    "route_plan": ['/general-search(query="stability, größte", mode=web)', "/math(Derive it.)"],
    "route_rationale": "Look it up, then derive.",
    "expected_artifacts": ["- notes.md"],
    "thinking_outline": ["1. Search", "2. Derive"],
    "handoff_plan": "/general-search -> /math (verify: the numbers; fallback: search again)",
    "todo_list": ["- [ ] /general-search: one source", "- [ ] /math: derive"],
    "difficulty": "intermediate",
    "tags": ["pde"],
    "acceptance_criteria": ["- the limit is stated"],
    "metrics": {"primary": ["error"]},
}


def _router_rows(path: Path, count: int, *wrong: dict[str, Any]) -> Path:
    rows = [{"id": n, **PLAN, "user_query": f" query {n}\n"} for n in range(count)]
    lines = [json.dumps(row) for row in [*rows, *wrong]]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_plans_become_prompts_and_completions_in_the_original_order(tmp_path: Path) -> None:
    source, out = _router_rows(tmp_path / "rows.jsonl", 40), tmp_path / "out"
    assert main(["sft", "router", str(source), "--out", str(out), "--seed", "42"]) == 0

    order = list(range(40))
    random.Random(42).shuffle(order)
    rows = [
        row for name in ("train", "validation", "test") for row in _lines(out / f"{name}.jsonl")
    ]
    assert [row["prompt"].partition("User query:\n")[2] for row in rows] == [
        f"query {n}" for n in order
    ]
    assert all(row["completion"] == json.dumps(PLAN, ensure_ascii=False) for row in rows)
    assert all(key in rows[0]["prompt"] for key in PLAN)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["counts"] == {"train": 34, "validation": 4, "test": 2}
    assert summary["tools"] == {"general-search": 40, "math": 40}
    assert summary["plan_shapes"] == {"general-search->math": 40}
    digest = hashlib.sha256((out / "train.jsonl").read_bytes()).hexdigest()
    assert summary["sha256"]["train"] == digest


def test_rows_whose_plan_is_not_whole_are_dropped_and_counted(tmp_path: Path) -> None:
    query = {**PLAN, "user_query": "q"}
    wrong: list[dict[str, Any]] = [
        {key: value for key, value in query.items() if key != "tags"},
        {**query, "difficulty": "hard"},
        {**query, "route_plan": ["/shell(rm)"]},
        {**query, "route_plan": []},
        {**query, "metrics": ["error"]},
        {**query, "user_query": " "},
    ]
    source, out = _router_rows(tmp_path / "rows.jsonl", 4, *wrong), tmp_path / "out"
    with source.open("a") as file:
        file.write("{torn\n")
    words = ["--out", str(out), "--think", "outline"]
    assert main(["sft", "router", str(source), *words]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rows"], summary["counts"]["train"], summary["dropped"]) == (11, 4, 7)
    assert summary["dropped_reasons"] == {
        "route_plan is wrong": 2,
        "no tags": 1,
        "difficulty is wrong": 1,
        "metrics is wrong": 1,
        "no query": 1,
        "no JSON object": 1,
    }
    assert _lines(out / "train.jsonl")[0]["completion"].startswith(
        "<think>\n1. Search\n2. Derive\n</think>\n{"
    )

    assert main(["sft", "router", str(source), "--out", str(out), "--limit", "2"]) == 0
    assert json.loads((out / "summary.json").read_text())["counts"]["train"] == 2


def test_only_solutions_that_box_the_answer_are_kept(tmp_path: Path) -> None:
    rows = [
        {"problem": "2+2?", "generated_solution": r"So \boxed{4}.", "expected_answer": "4"},
        {"question": "2+3?", "generated_solution": r"So \boxed{6}.", "expected_answer": "5"},
        {
            "problem": "9+9?",
            "solution": r"<think>\boxed{1}</think> \boxed{18}",
            "expected_answer": "18",
        },
        {"problem": "2+4?", "generated_solution": "It is 6.", "expected_answer": "6"},
        {"problem": "2+5?", "expected_answer": "7"},
    ]
    source, out = tmp_path / "rows.json", tmp_path / "out"
    source.write_text(json.dumps(rows))
    assert main(["sft", "math", str(source), "--out", str(out)]) == 0
    kept = _lines(out / "train.jsonl")
    assert sorted(row["prompt"][1]["content"] for row in kept) == ["2+2?", "9+9?"]
    assert kept[0]["completion"][0]["role"] == "assistant"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["dropped_reasons"] == {"wrong by its own check": 2, "no solution": 1}
    assert sorted(path.name for path in out.iterdir()) == [
        "summary.json",
        "train.jsonl",
        "validation.jsonl",
    ]


def test_programs_become_conversations_also_from_parquet(tmp_path: Path) -> None:
    tables, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"instruction": f"Write f{n}.", "output": f"def f{n}(): ..."} for n in range(20)]
    source, out = tmp_path / "rows.parquet", tmp_path / "out"
    parquet.write_table(tables.Table.from_pylist([*rows, {"instruction": "x"}]), source)
    assert main(["sft", "code", str(source), "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["counts"] == {"train": 17, "validation": 2, "test": 1}
    messages = _lines(out / "train.jsonl")[0]["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"].removeprefix("Write ")[:-1] in messages[2]["content"]


def test_a_finished_folder_is_put_into_a_bucket_and_a_folder(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    source, out = _router_rows(tmp_path / "rows.jsonl", 20), tmp_path / "out"
    words = ["sft", "router", str(source), "--out", str(out), "--upload"]
    assert main([*words, "memory://bucket/router"]) == 0
    bucket = fsspec.filesystem("memory")
    assert bucket.cat("/bucket/router/train.jsonl") == (out / "train.jsonl").read_bytes()
    assert bucket.exists("/bucket/router/summary.json")
    assert main([*words, str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy/test.jsonl").read_bytes() == (out / "test.jsonl").read_bytes()


def test_a_finished_folder_is_put_on_the_hub_in_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, name: str, **facts: Any) -> None:
            calls.append((name, facts))

        def upload_folder(self, **facts: Any) -> None:
            calls.append((facts["repo_id"], facts))

    monkeypatch.setattr(hub, "HfApi", Api)
    source, out = _router_rows(tmp_path / "rows.jsonl", 20), tmp_path / "out"
    target = "hf://datasets/me/plans/v1"
    assert main(["sft", "router", str(source), "--out", str(out), "--upload", target]) == 0
    assert [name for name, _ in calls] == ["me/plans", "me/plans"]
    assert calls[0][1]["repo_type"] == calls[1][1]["repo_type"] == "dataset"
    assert calls[0][1]["private"] and calls[1][1]["path_in_repo"] == "v1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--upload", "hf://me/plans"], "is not a data set"),
        (["--upload", "nosuch://bucket"], "cannot be used"),
        (["--val_ratio", "0.6", "--test_ratio", "0.4"], "below 1 together"),
        (["--limit", "0"], "limit"),
        (["--thnik", "outline"], "think"),
    ],
)
def test_a_wrong_wish_is_told_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    source, out = _router_rows(tmp_path / "rows.jsonl", 20), tmp_path / "out"
    assert main(["sft", "router", str(source), "--out", str(out), *words]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_nothing_of_use_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text('{"user_query": "q"}\n')
    assert main(["sft", "router", str(source), "--out", str(out)]) == 2
    assert "no route_plan" in capsys.readouterr().err
    assert main(["sft", "router", str(tmp_path / "none.jsonl"), "--out", str(out)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
