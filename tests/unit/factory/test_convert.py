"""`envserver convert` and `validate`: trajectories of others, and what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from envserver_factory.trajectories.convert_foreign import unified_of_foreign
from hypothesis import example, given
from hypothesis import strategies as st

from envserver import main
from envserver.export import problems_of

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "task_id": "math-1",
    "domain": "math",
    "question": None,
    "actions": [
        {"step": 1, "tool": "reason", "input": {}, "output": "x", "ts": 1.0},
        {"step": 2, "tool": "finalize", "input": {}, "output": "4", "ts": 2.0},
    ],
    "final_answer": "4",
    "metadata": {"start_ts": 1.0, "end_ts": 2.0},
}
TRACE: dict[str, Any] = {
    "run_id": "tidy_tiny_gold_001_20260101_000000",
    "scenario": "tidy",
    "model": {"name": "tiny", "hf_id": "", "backend": "sim"},
    "label": "gold",
    "timestamp": "2026-01-01T00:00:00+00:00",
    "prompt": "Tidy up.",
    "seed": 1,
    "steps": [
        {"i": 0, "type": "thought", "text": "Look first."},
        {
            "i": 1,
            "type": "tool_call",
            "text": '{"tool": "list_dir", "args": {"path": "."}}',
            "tool": "list_dir",
            "args": {"path": "."},
        },
        {"i": 2, "type": "tool_result", "text": "a.txt"},
        {"i": 3, "type": "final", "text": "Done."},
    ],
    "outcome": {"num_steps": 4, "elapsed_seconds": 1.5, "completed": True, "error": False},
}


def _file(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def _changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def _foreign(value: Any) -> dict[str, Any]:
    document = unified_of_foreign(value, task_id="swe-1", domain="swe")
    assert problems_of(document) == []
    return document


# What ojo1996/VideoMultiAgents_HOEY's converter makes of these, but for what it loses.
FOREIGN = [
    (
        {
            "task": "List files",
            "steps": [
                {"tool": "bash", "input": {"command": "ls"}, "output": "a b"},
                {"name": "submit", "args": {"x": 1}, "response": "ok"},
            ],
            "answer": "2 files",
        },
        "List files",
        [("bash", {"command": "ls"}, "a b"), ("submit", {"x": 1}, "ok")],
        "2 files",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "THOUGHT"},
                {"role": "tool", "content": "out"},
                {"role": "assistant", "content": "done"},
            ]
        },
        None,
        [("tool", "out", "")],
        "done",
    ),
    ({"meta": {"prompt": "deep"}, "result": {"answer": "x"}}, "deep", [], "x"),
    ({"actions": [{"step": 5, "type": "think"}], "final": ""}, None, [("think", "", "")], ""),
    (
        {
            "instruction": "fix",
            "trajectory": [{"action": "ls", "observation": "a", "thought": "?"}],
        },
        "fix",
        [("bash", {"command": "ls"}, "a")],
        "",
    ),
]


@pytest.mark.parametrize(("raw", "question", "actions", "answer"), FOREIGN)
def test_trajectories_of_others_become_unified(
    raw: Any, question: str | None, actions: list[Any], answer: str
) -> None:
    document = _foreign(raw)
    assert document["question"] == question
    found = [(one["tool"], one["input"], one["output"]) for one in document["actions"]]
    assert found == actions
    assert document["final_answer"] == answer


def test_what_has_no_place_of_its_own_is_kept() -> None:
    raw = {
        "question": "2+2?",
        "actions": [{"tool": "calc", "input": "2+2", "output": "4", "cost": 3}],
        "answer": 4,
        "reward": {"total": 0.8, "quality": 1.0},
        "model_name": "m",
        "seed": 3,
        "start_time": "2026-01-01T00:00:00Z",
        "success": True,
        "metadata": {"end_ts": 1767225661.5, "host": "h"},
    }
    document = _foreign(raw)
    assert document["actions"][0]["cost"] == 3
    assert document["final_answer"] == "4"
    metadata = document["metadata"]
    assert (metadata["start_ts"], metadata["end_ts"]) == (1767225600.0, 1767225661.5)
    assert (metadata["reward"], metadata["components"]) == (0.8, {"quality": 1.0})
    assert (metadata["model"], metadata["seed"]) == ("m", 3)
    assert metadata["raw"]["success"] is True
    assert metadata["raw"]["metadata"]["host"] == "h"


def test_calls_in_messages_are_actions_with_their_results() -> None:
    call = {"id": "c1", "function": {"name": "grep", "arguments": '{"pattern": "x"}'}}
    messages = [
        {"role": "user", "content": "Find x."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py:1"},
        {"role": "assistant", "content": "In a.py."},
    ]
    document = _foreign(messages)
    assert document["actions"][1] == {
        "step": 2,
        "tool": "grep",
        "input": {"pattern": "x"},
        "output": "a.py:1",
    }
    assert document["metadata"]["sequences"][0]["messages"] == messages


def test_nothing_is_invented() -> None:
    steps = [{"role": "assistant", "content": "PLAN"}, {"role": "tool", "content": ""}]
    with pytest.raises(ValueError, match=r"steps\[0\] has no tool, no input and no output"):
        _foreign({"domain": "swe", "steps": steps})
    for empty in ({}, [], 7, {"steps": []}):
        with pytest.raises(ValueError):
            _foreign(empty)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text("ab "),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "task",
                    "steps",
                    "actions",
                    "messages",
                    "role",
                    "content",
                    "tool",
                    "name",
                    "type",
                    "input",
                    "output",
                    "answer",
                    "result",
                    "metadata",
                    "ts",
                    "step",
                    "function",
                    "reward",
                    "model",
                    "start_ts",
                    "end_ts",
                    "tool_calls",
                    "prompt",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(JSON)
@example({"end_ts": -1, "task": "before 1970, without a start"})
@example({"start_ts": 5, "end_ts": 3, "task": "ends before it starts"})
def test_whatever_it_is_it_becomes_valid_or_is_refused(value: Any) -> None:
    try:
        document = unified_of_foreign(value, task_id="swe-1", domain="swe")
    except ValueError:
        return
    assert problems_of(document) == []


def test_files_of_all_kinds_are_converted_and_the_bad_ones_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = tmp_path / "raw", tmp_path / "unified"
    _file(raw / "math" / "one.json", {"question": "2+2?", "answer": "4"})
    _file(raw / "math" / "own.json", GOOD)
    _file(raw / "traces" / "run_001.json", TRACE)
    _file(raw / "mhqa" / "many.jsonl", '{"question": "a", "answer": "b"}\n\n{"query": "c"}\n')
    _file(raw / "bad" / "torn.json", '{"question": ')
    _file(raw / "bad" / "nan.json", '{"domain": "swe", "question": "q", "answer": NaN}')
    _file(raw / "bad" / "where.json", {"question": "q"})
    assert main(["convert", str(raw), "--out", str(out)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.partition("bad/")[2].partition(":")[0] for line in told] == [
        "nan.json",
        "torn.json",
        "where.json",
    ]
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.json")) == [
        "math/math-1.json",
        "math/math-one.json",
        "mhqa/mhqa-many-000001.json",
        "mhqa/mhqa-many-000003.json",
        *(str(path.relative_to(out)) for path in out.rglob("swe/*.json")),
    ]
    trace = json.loads(next(out.rglob("swe/*.json")).read_text())
    assert [one["tool"] for one in trace["actions"]] == ["reason", "list_dir", "finalize"]
    assert trace["actions"][1]["output"] == "a.txt"
    assert main(["validate", str(out)]) == 0
    capsys.readouterr()
    assert main(["validate", "--schema"]) == 0
    schema = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    assert all(schema.is_valid(json.loads(path.read_text())) for path in out.rglob("*.json"))

    bulk = tmp_path / "bulk.jsonl"
    assert main(["convert", str(out), "--out", str(bulk)]) == 0
    assert len(bulk.read_text().splitlines()) == 5
    assert main(["validate", str(bulk)]) == 0
    assert main(["convert", str(raw), "--domain", "nosuch", "--out", str(out)]) == 2
    assert main(["convert", str(tmp_path / "none"), "--out", str(out)]) == 2


def test_two_trajectories_of_one_id_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        _file(tmp_path / "raw" / f"{name}.json", {"id": 7, "question": name})
    out = tmp_path / "unified"
    assert main(["convert", str(tmp_path / "raw"), "--domain", "gaia", "--out", str(out)]) == 1
    assert "b.json: its task id 'gaia-7' is that of" in capsys.readouterr().out
    assert json.loads((out / "gaia/gaia-7.json").read_text())["question"] == "a"


BAD = [
    ({"schema_version": 2}, "$.schema_version"),
    ({"domain": "chess"}, "$.domain"),
    ({"task_id": "swe-1"}, "does not begin with"),
    ({"final_answer": None}, "$.final_answer"),
    ({"question": 7}, "$.question"),
    ({"actions": [{**GOOD["actions"][0], "step": 2}]}, "where 1 is due"),
    ({"actions": [{"step": 1, "tool": "", "input": "", "output": ""}]}, "$.actions[0].tool"),
    ({"actions": [{"step": 1, "tool": "unknown", "input": "", "output": ""}]}, "nothing is known"),
    ({"actions": [{"step": 1, "tool": "bash", "input": {}}]}, "output"),
    ({"actions": [{**GOOD["actions"][0], "ts": 9.0}]}, "out of order"),
    ({"metadata": {"start_ts": 2.0, "end_ts": 1.0}}, "before it starts"),
    ({"metadata": {"start_ts": "now", "end_ts": 1.0}}, "$.metadata.start_ts"),
]


def test_every_bad_file_is_listed_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (changes, _) in enumerate(BAD):
        _file(tmp_path / f"{number:02d}.json", _changed(**{"task_id": f"math-{number}"} | changes))
    _file(tmp_path / "nan.json", json.dumps(_changed(final_answer="x")).replace('"x"', "NaN"))
    _file(tmp_path / "list.json", [GOOD])
    _file(tmp_path / "good.json", _changed(task_id="math-good"))
    _file(tmp_path / "MANIFEST.json", {"files": []})
    assert main(["validate", str(tmp_path)]) == 1
    told: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        place, _, reason = line.partition(": ")
        told[place] = f"{told.get(place, '')} {reason}"
    for number, (_, said) in enumerate(BAD):
        assert said in told[str(tmp_path / f"{number:02d}.json")]
    assert "NaN" in told[str(tmp_path / "nan.json")]
    assert str(tmp_path / "list.json") in told
    assert str(tmp_path / "good.json") not in told
    assert len(told) == len(BAD) + 2


def test_lines_are_validated_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        GOOD,
        _changed(task_id="math-2"),
        GOOD,
        _changed(task_id="own_env-1", domain="own_env"),
    ]
    path = _file(tmp_path / "bulk.jsonl", "\n".join([*map(json.dumps, lines), "{torn", ""]))
    assert main(["validate", str(path)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in told] == [f"{path}, line {n}" for n in (3, 4, 5)]
    assert "twice" in told[0] and "own_env" in told[1] and "no JSON" in told[2]

    good = _file(tmp_path / "good.jsonl", "\n".join(map(json.dumps, (*lines[:2], lines[3]))))
    assert main(["validate", str(good), "--domains", "own_env"]) == 0
    assert main(["validate", str(tmp_path / "nothing")]) == 2
