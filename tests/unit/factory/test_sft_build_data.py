"""`envserver sft router|math|code`: data sets prepared for fine-tuning, and where they are put."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.in_process import Run

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
ROUTER = "sft router rows.jsonl --out out"


def _router_rows(count: int, *wrong: dict[str, Any]) -> None:
    rows = [{"id": n, **PLAN, "user_query": f" query {n}\n"} for n in range(count)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, *wrong])
    Path("rows.jsonl").write_text(text, encoding="utf-8")


def _lines(name: str) -> list[Any]:
    text = Path("out", f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _summary() -> dict[str, Any]:
    return dict(json.loads(Path("out/summary.json").read_text()))


def test_plans_become_prompts_and_completions_in_the_original_order(run: Run) -> None:
    _router_rows(40)
    run(f"{ROUTER} --seed 42")
    order = list(range(40))
    random.Random(42).shuffle(order)
    rows = [row for name in ("train", "validation", "test") for row in _lines(name)]
    queries = [row["prompt"].partition("User query:\n")[2] for row in rows]
    assert queries == [f"query {n}" for n in order]
    assert all(row["completion"] == json.dumps(PLAN, ensure_ascii=False) for row in rows)
    assert all(key in rows[0]["prompt"] for key in PLAN)
    summary = _summary()
    assert summary["counts"] == {"train": 34, "validation": 4, "test": 2}
    assert summary["tools"] == {"general-search": 40, "math": 40}
    assert summary["plan_shapes"] == {"general-search->math": 40}
    digest = hashlib.sha256(Path("out/train.jsonl").read_bytes()).hexdigest()
    assert summary["sha256"]["train"] == digest


def test_rows_whose_plan_is_not_whole_are_dropped_and_counted(run: Run) -> None:
    query = {**PLAN, "user_query": "q"}
    changes: list[dict[str, Any]] = [
        {"difficulty": "hard"}, {"route_plan": ["/shell(rm)"]}, {"route_plan": []},
        {"metrics": ["error"]}, {"user_query": " "},
    ]  # fmt: skip
    without = {key: value for key, value in query.items() if key != "tags"}
    _router_rows(4, without, *(query | change for change in changes))
    with Path("rows.jsonl").open("a") as file:
        file.write("{torn\n")
    run(f"{ROUTER} --think outline")
    summary = _summary()
    assert (summary["rows"], summary["counts"]["train"], summary["dropped"]) == (11, 4, 7)
    reasons = ["no tags", "difficulty is wrong", "metrics is wrong", "no query", "no JSON object"]
    assert summary["dropped_reasons"] == {"route_plan is wrong": 2, **dict.fromkeys(reasons, 1)}
    assert _lines("train")[0]["completion"].startswith("<think>\n1. Search\n2. Derive\n</think>\n{")
    run(f"{ROUTER} --limit 2")
    assert _summary()["counts"]["train"] == 2


def test_only_solutions_that_box_the_answer_are_kept(run: Run) -> None:
    thought = r"<think>\boxed{1}</think> \boxed{18}"
    rows = [
        {"problem": "2+2?", "generated_solution": r"So \boxed{4}.", "expected_answer": "4"},
        {"question": "2+3?", "generated_solution": r"So \boxed{6}.", "expected_answer": "5"},
        {"problem": "9+9?", "solution": thought, "expected_answer": "18"},
        {"problem": "2+4?", "generated_solution": "It is 6.", "expected_answer": "6"},
        {"problem": "2+5?", "expected_answer": "7"},
    ]
    Path("rows.json").write_text(json.dumps(rows))
    run("sft math rows.json --out out")
    kept = _lines("train")
    assert sorted(row["prompt"][1]["content"] for row in kept) == ["2+2?", "9+9?"]
    assert kept[0]["completion"][0]["role"] == "assistant"
    assert _summary()["dropped_reasons"] == {"wrong by its own check": 2, "no solution": 1}
    names = {path.name for path in Path("out").iterdir()}
    assert names == {"summary.json", "train.jsonl", "validation.jsonl"}


def test_programs_become_conversations_also_from_parquet(run: Run) -> None:
    tables, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"instruction": f"Write f{n}.", "output": f"def f{n}(): ..."} for n in range(20)]
    parquet.write_table(tables.Table.from_pylist([*rows, {"instruction": "x"}]), "rows.parquet")
    run("sft code rows.parquet --out out")
    assert _summary()["counts"] == {"train": 17, "validation": 2, "test": 1}
    messages = _lines("train")[0]["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"].removeprefix("Write ")[:-1] in messages[2]["content"]


def test_a_finished_folder_is_put_into_a_bucket_and_a_folder(run: Run) -> None:
    fsspec = pytest.importorskip("fsspec")
    _router_rows(20)
    run(f"{ROUTER} --upload memory://bucket/router")
    bucket, out = fsspec.filesystem("memory"), Path("out")
    assert bucket.cat("/bucket/router/train.jsonl") == (out / "train.jsonl").read_bytes()
    assert bucket.exists("/bucket/router/summary.json")
    run(f"{ROUTER} --upload copy")
    assert Path("copy/test.jsonl").read_bytes() == (out / "test.jsonl").read_bytes()


def test_a_finished_folder_is_put_on_the_hub_in_one_commit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    calls: list[dict[str, Any]] = []

    class Api:
        def create_repo(self, name: str, **facts: Any) -> None:
            calls.append({"repo_id": name, **facts})

        def upload_folder(self, **facts: Any) -> None:
            calls.append(facts)

    monkeypatch.setattr(hub, "HfApi", Api)
    _router_rows(20)
    run(f"{ROUTER} --upload hf://datasets/me/plans/v1")
    made, uploaded = calls
    for call in calls:
        assert (call["repo_id"], call["repo_type"]) == ("me/plans", "dataset")
    assert made["private"] and uploaded["path_in_repo"] == "v1"


def test_a_wrong_wish_is_told_before_any_work(run: Run) -> None:
    _router_rows(20)
    for words, said in {
        "--upload hf://me/plans": "is not a data set",
        "--upload nosuch://bucket": "cannot be used",
        "--val_ratio 0.6 --test_ratio 0.4": "below 1 together",
        "--limit 0": "limit",
        "--thnik outline": "think",
    }.items():
        assert said in run(f"{ROUTER} {words}", status=2)
    Path("rows.jsonl").write_text('{"user_query": "q"}\n')
    assert "no route_plan" in run(ROUTER, status=2)
    run("sft router none.jsonl --out out", status=2)
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]
