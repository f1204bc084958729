"""`envserver convert` and `validate`: trajectories of others, and what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from envserver_factory.trajectories.convert_foreign import unified_of_foreign
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.in_process import Run

from envserver.export import problems_of

CASES = json.loads(Path(__file__).with_name("trajectories.json").read_text())
"""What there is to convert, and what is wrong with a document. `foreign`: a trajectory, and its
question, actions and answer; what ojo1996/VideoMultiAgents_HOEY's converter makes of it, but for
what that loses."""
GOOD = CASES["good"]


def _file(path: str, value: Any) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _foreign(value: Any) -> dict[str, Any]:
    document = unified_of_foreign(value, task_id="swe-1", domain="swe")
    assert problems_of(document) == []
    return document


@pytest.mark.parametrize(("raw", "question", "actions", "answer"), CASES["foreign"])
def test_trajectories_of_others_become_unified(
    raw: Any, question: str | None, actions: list[Any], answer: str
) -> None:
    document = _foreign(raw)
    found = [[one["tool"], one["input"], one["output"]] for one in document["actions"]]
    assert (document["question"], found, document["final_answer"]) == (question, actions, answer)


def test_what_has_no_place_of_its_own_is_kept() -> None:
    document = _foreign(CASES["kept"])
    assert document["actions"][0]["cost"] == 3
    assert document["final_answer"] == "4"
    metadata, raw = document["metadata"], document["metadata"].pop("raw")
    assert metadata.items() >= {
        "start_ts": 1767225600.0, "end_ts": 1767225661.5, "reward": 0.8, "model": "m", "seed": 3,
    }.items()  # fmt: skip
    assert metadata["components"] == {"quality": 1.0}
    assert raw["success"] is True and raw["metadata"]["host"] == "h"


def test_calls_in_messages_are_actions_with_their_results() -> None:
    document = _foreign(CASES["messages"])
    action = {"step": 2, "tool": "grep", "input": {"pattern": "x"}, "output": "a.py:1"}
    assert document["actions"][1] == action
    assert document["metadata"]["sequences"][0]["messages"] == CASES["messages"]


def test_nothing_is_invented() -> None:
    steps = [{"role": "assistant", "content": "PLAN"}, {"role": "tool", "content": ""}]
    with pytest.raises(ValueError, match=r"steps\[0\] has no tool, no input and no output"):
        _foreign({"domain": "swe", "steps": steps})
    for empty in ({}, [], 7, {"steps": []}):
        with pytest.raises(ValueError):
            _foreign(empty)


FIELDS = (
    "task steps actions messages role content tool name type input output answer result metadata "
    "ts step function reward model start_ts end_ts tool_calls prompt"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text("ab "),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS.split()), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(100))
@given(JSON)
@example({"end_ts": -1, "task": "before 1970, without a start"})
@example({"start_ts": 5, "end_ts": 3, "task": "ends before it starts"})
def test_whatever_it_is_it_becomes_valid_or_is_refused(value: Any) -> None:
    try:
        document = unified_of_foreign(value, task_id="swe-1", domain="swe")
    except ValueError:
        return
    assert problems_of(document) == []


def test_files_of_all_kinds_are_converted_and_the_bad_ones_told(run: Run) -> None:
    _file("raw/math/one.json", {"question": "2+2?", "answer": "4"})
    _file("raw/math/own.json", GOOD)
    _file("raw/traces/run_001.json", CASES["trace"])
    _file("raw/mhqa/many.jsonl", '{"question": "a", "answer": "b"}\n\n{"query": "c"}\n')
    _file("raw/bad/torn.json", '{"question": ')
    _file("raw/bad/nan.json", '{"domain": "swe", "question": "q", "answer": NaN}')
    _file("raw/bad/where.json", {"question": "q"})
    told = run("convert raw --out unified", status=1).out.splitlines()
    bad = [line.partition("bad/")[2].partition(":")[0] for line in told]
    assert bad == ["nan.json", "torn.json", "where.json"]
    out = Path("unified")
    (trace,) = out.rglob("swe/*.json")
    names = ("math/math-1", "math/math-one", "mhqa/mhqa-many-000001", "mhqa/mhqa-many-000003")
    files = [*(out / f"{name}.json" for name in names), trace]
    assert sorted(out.rglob("*.json")) == files
    actions = _read(trace)["actions"]
    assert [one["tool"] for one in actions] == ["reason", "list_dir", "finalize"]
    assert actions[1]["output"] == "a.txt"
    run("validate unified")
    schema = jsonschema.Draft202012Validator(json.loads(run("validate --schema").out))
    assert all(schema.is_valid(_read(path)) for path in files)

    run("convert unified --out bulk.jsonl")
    lines = Path("bulk.jsonl").read_text().splitlines()
    assert len(lines) == 5
    run("validate bulk.jsonl")
    own = json.dumps({**GOOD, "task_id": "own_env-1", "domain": "own_env"})
    _file("bulk.jsonl", "\n".join([*lines, own, lines[0], "{torn"]))
    told = run("validate bulk.jsonl --domains own_env", status=1).out.splitlines()
    for line, number, said in zip(told, (7, 8), ("twice", "no JSON"), strict=True):
        assert line.startswith(f"bulk.jsonl, line {number}: ") and said in line

    for name in ("a", "b"):
        _file(f"twice/{name}.json", {"id": 7, "question": name})
    told = run("convert twice --domain gaia --out once", status=1).out
    assert "b.json: its task id 'gaia-7' is that of" in told
    assert _read(Path("once/gaia/gaia-7.json"))["question"] == "a"


def test_every_bad_file_is_listed_with_its_reason(run: Run) -> None:
    reasons = {f"{number:02d}.json": said for number, (_, said) in enumerate(CASES["bad"])}
    for name, (changes, _) in zip(reasons, CASES["bad"], strict=True):
        _file(name, {**GOOD, "task_id": f"math-{name[:2]}", **changes})
    _file("nan.json", json.dumps({**GOOD, "final_answer": "x"}).replace('"x"', "NaN"))
    _file("list.json", [GOOD])
    _file("good.json", {**GOOD, "task_id": "math-good"})
    _file("MANIFEST.json", {"files": []})
    told: dict[str, str] = {}
    for line in run("validate .", status=1).out.splitlines():
        place, _, reason = line.partition(": ")
        told[Path(place).name] = f"{told.get(Path(place).name, '')} {reason}"
    assert told.keys() == {*reasons, "nan.json", "list.json"}
    for name, said in {**reasons, "nan.json": "NaN"}.items():
        assert said in told[name]
