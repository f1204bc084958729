"""`envserver sft build` and `preview`: rows per tool from unified trajectories."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from envserver_factory.sft_building.splits import split_three, split_tools, split_tools_by_group
from hypothesis import given
from hypothesis import strategies as st

from envserver import main
from envserver.export import problems_of

ROOT = Path(__file__).parents[3]

TEMPLATES = """
tools:
  reason:
    instruction: |
      Task: {question}
      Context: {context}
    postprocess: {keep_first_bash_block: true}
  bash:
    instruction: "Next command for {question}"
    response_from: action_input.command
  reason_hop:
    instruction: "{question} Notes: {notes}"
  load_context:
    instruction: "Load {path}."
"""


def _action(step: int, tool: str, given: Any, output: Any) -> dict[str, Any]:
    return {"step": step, "tool": tool, "input": given, "output": output}


def _trajectory(task_id: str, *actions: Any, reward: float | None = None) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "task_id": task_id,
        "domain": task_id.partition("-")[0],
        "question": f"Question of {task_id}?",
        "actions": [_action(number, *action) for number, action in enumerate(actions, 1)],
        "final_answer": "",
        "metadata": {"start_ts": 0.0, "end_ts": 1.0, "reward": reward},
    }


def _write(folder: Path, *trajectories: dict[str, Any]) -> Path:
    for one in trajectories:
        assert problems_of(one) == []
        path = folder / one["domain"] / f"{one['task_id']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one), encoding="utf-8")
    return folder


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    (tmp_path / "templates.yaml").write_text(TEMPLATES)
    maths = [
        _trajectory(
            f"math-{n:02d}",
            ("reason", {}, f"First.\n```bash\necho {n}\n```\nThen.\n```bash\nno\n```"),
            ("bash", {"command": f"echo {n}"}, {"returncode": 0, "stdout": f"é{n}", "stderr": ""}),
            reward=n / 10,
        )
        for n in range(10)
    ]
    hops = [
        _trajectory(
            f"mhqa-{n:02d}",
            ("decompose", {}, "1. a 2. b"),
            ("reason_hop", {"hop": "a"}, f"one of {n}"),
            ("reason_hop", {"hop": "b"}, f"two of {n}"),
            ("reason", {}, "no block of bash"),
        )
        for n in range(30)
    ]
    lone = _trajectory("video-0", ("load_context", {"path": "v.txt"}, {"text": "ein Tisch, grün"}))
    return _write(tmp_path / "unified", *maths, *hops, lone)


def _build(unified: Path, out: Path, *words: str) -> dict[str, Any]:
    templates = ["--templates", str(unified.parent / "templates.yaml")]
    assert main(["sft", "build", str(unified), *templates, "--out", str(out), *words]) == 0
    return {
        str(path.relative_to(out)): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(out.rglob("*.jsonl"))
    }


def test_rows_their_order_and_their_split_are_those_of_the_script(
    unified: Path, tmp_path: Path
) -> None:
    files = _build(unified, tmp_path / "sft")

    maths = [f"math-{n:02d}" for n in range(10)]
    rng = random.Random(123)
    for tool, count in (("reason", 10), ("bash", 10), ("reason_hop", 60), ("load_context", 1)):
        order = list(range(count))
        rng.shuffle(order)
        if tool != "bash":
            continue
        rows = [
            {
                "tool": "bash",
                "instruction": f"Next command for Question of {maths[n]}?",
                "output": f"echo {n}",
                "meta": {"task_id": maths[n], "domain": "math", "step": 2},
            }
            for n in order
        ]
        assert files["bash/val.jsonl"] + files["bash/train.jsonl"] == rows
    assert files["reason/val.jsonl"][0]["instruction"].endswith("Context:")
    assert {row["output"] for row in files["reason/train.jsonl"]} <= {
        f"echo {n}" for n in range(10)
    }
    assert files["load_context/train.jsonl"] == files["load_context/val.jsonl"]
    assert files["load_context/train.jsonl"][0]["output"] == '{"text": "ein Tisch, grün"}'
    assert "grün" in (tmp_path / "sft/load_context/train.jsonl").read_text(encoding="utf-8")
    summary = {
        "reason": {"train": 9, "val": 1},
        "bash": {"train": 9, "val": 1},
        "reason_hop": {"train": 57, "val": 3},
        "load_context": {"train": 1, "val": 1},
    }
    assert (tmp_path / "sft/SUMMARY.json").read_text() == json.dumps(summary, indent=2)


def test_what_is_no_text_is_written_as_json_and_nothing_at_all_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "templates.yaml").write_text(TEMPLATES)
    said = [({"é": 1}, '{"é": 1}'), (None, None), ([], "[]"), (0, "0"), (" ", " "), ("", None)]
    docs = [
        _trajectory(f"video-{n}", ("load_context", {"path": "a"}, o))
        for n, (o, _) in enumerate(said)
    ]
    rows = _build(_write(tmp_path / "unified", *docs), tmp_path / "out")
    outputs = {row["meta"]["task_id"]: row["output"] for part in rows.values() for row in part}
    assert outputs == {f"video-{n}": text for n, (_, text) in enumerate(said) if text is not None}


def test_failures_and_blanks_are_no_rows_and_domains_and_prefixes_have_templates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "templates.yaml").write_text(
        "tools:\n  reason: {instruction: 'T: {question}'}\n  open: {instruction: 'P: {path}'}\n"
        "  'tool:*': {instruction: 'T: {question}', response_from: action_call}\n"
        "domains:\n  math:\n    reason: {instruction: 'M: {question}'}\n"
    )
    refused = _trajectory("tau-1", ("tool:pay", {"to": "Ida"}, None), ("open", {}, "words"))
    refused["actions"][0]["error"] = "no such customer"
    older = _trajectory("router-1", ("reason", {}, {"error": "json", "message": "no plan"}))
    paid = _trajectory("tau-2", ("tool:pay", {"to": "Ida"}, "paid"), ("reason", {}, "so"))
    own = _trajectory("math-1", ("reason", {}, "so"))
    files = _build(_write(tmp_path / "unified", refused, older, paid, own), tmp_path / "out")
    rows = {
        (row["tool"], row["instruction"][:2], row["output"])
        for part in files.values()
        for row in part
    }
    call = '{"name": "pay", "arguments": {"to": "Ida"}}'
    assert rows == {("tool", "T:", call), ("reason", "T:", "so"), ("reason", "M:", "so")}
    said = " ".join(capsys.readouterr().out.split())
    assert "2 failed or refused actions; 1 with an empty placeholder" in said
    assert "tau: 2 rows (reason 1, tool 1)" in said
    assert "router: 0 rows (no action became one)" in said


def test_rows_of_a_task_stand_on_one_side_over_all_tools(unified: Path, tmp_path: Path) -> None:
    several = [
        _trajectory(f"gaia-0-{n}", *[("bash", {"command": f"{n}{i}"}, "") for i in range(3)])
        for n in range(9)
    ]
    for one in several:  # rollouts of one task
        one["metadata"]["task_id"] = "0"
    _write(unified, *several)
    files = _build(unified, tmp_path / "sft", "--group-by", "task_id", "--val_ratio", "0.3")
    sides = {
        side: {
            "gaia-0" if (task := row["meta"]["task_id"]).startswith("gaia-0") else task
            for name, rows in files.items()
            if name.endswith(f"{side}.jsonl")
            for row in rows
        }
        for side in ("train", "val")
    }
    assert not sides["train"] & sides["val"]
    assert len(files["reason_hop/val.jsonl"]) >= 2 and files["bash/val.jsonl"]
    assert files["load_context/val.jsonl"] == []


def test_what_else_can_be_wanted(unified: Path, tmp_path: Path) -> None:
    strict = _build(unified, tmp_path / "strict", "--strict-split")
    assert strict["load_context/val.jsonl"] == []

    good = _build(unified, tmp_path / "good", "--min-reward", "0.8")
    kept = {row["meta"]["task_id"] for rows in good.values() for row in rows}
    assert kept == {"math-08", "math-09"}

    full = _build(unified, tmp_path / "full", "--context", "--notes")
    rows = [row for rows in full.values() for row in rows]
    second = next(r for r in rows if r["meta"]["task_id"] == "mhqa-07" and r["meta"]["step"] == 3)
    assert second["instruction"] == "Question of mhqa-07? Notes: one of 7"

    said = _build(unified, tmp_path / "said", "--form", "messages")["bash/val.jsonl"][0]
    assert [message["role"] for message in said["messages"]] == ["user", "assistant"]
    assert {"env", "task_id", "reward", "tool", "step"} < said.keys()


def test_a_folder_is_built_again_but_another_is_left_alone(
    unified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", "build", str(unified), "--templates", str(tmp_path / "templates.yaml")]
    first = _build(unified, tmp_path / "sft")
    assert _build(unified, tmp_path / "sft") == first

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    assert main([*words, "--out", str(other)]) == 2
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]

    (unified / "math" / "math-99.json").write_text('{"task_id": ')
    assert main([*words, "--out", str(tmp_path / "sft")]) == 2
    assert "math-99.json: no JSON" in capsys.readouterr().err
    assert json.loads((tmp_path / "sft/SUMMARY.json").read_text())["bash"] == {"train": 9, "val": 1}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tools: {bash: {instruction: 'Do {this}'}}", "{this} is not one of"),
        ("tools: {bash: {instruction: 'Do {'}}", "written twice"),
        ("tools: {bash: {instruction: x, response_from: output}}", "tools.bash.response_from"),
        ("tools: {bash: {instruktion: x}}", "tools.bash.instruction"),
        ("tools: [", "cannot be read"),
    ],
)
def test_a_wrong_template_is_named(
    unified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    out = str(tmp_path / "sft")
    assert main(["sft", "build", str(unified), "--templates", str(path), "--out", out]) == 2
    assert said in capsys.readouterr().err


def test_the_preview_writes_nothing(
    unified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    templates = ["--templates", str(tmp_path / "templates.yaml")]
    assert main(["sft", "preview", str(unified), *templates, "--tool", "bash", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["tool"] == "bash" and row["output"] == "echo 0"
    assert main(["sft", "preview", str(unified), *templates]) == 0
    assert "decompose (30)" in capsys.readouterr().out


def test_the_shipped_templates_fit_what_our_environments_log(tmp_path: Path) -> None:
    unified = _write(
        tmp_path / "unified",
        _trajectory("math-0", ("calculate", {"expression": "1+1"}, "2"), ("finalize", {}, "2")),
    )
    shipped = str(ROOT / "configs/sft_templates.yaml")
    out = tmp_path / "sft"
    assert main(["sft", "build", str(unified), "--templates", shipped, "--out", str(out)]) == 0
    assert json.loads((out / "calculate/train.jsonl").read_text())["output"] == "1+1"


# Facts of the original scripts: ALikesToCode/CourseGPT-Pro-DSAI-Lab-Group-6, seed 42.
SPLITS = [
    (5, (5, 0, 0), "08d5762c7507195977bf9c72ed1b015b60047407014cb33c47f4bb30ca3bf62a"),
    (8189, (6962, 818, 409), "fd02047e3776cb11f90fcc5dadea4167ee867538d82bcdecca17acd7feaabcfa"),
]


@pytest.mark.parametrize(("count", "counts", "digest"), SPLITS)
def test_rows_are_split_as_the_original_does(
    count: int, counts: tuple[int, int, int], digest: str
) -> None:
    parts = split_three(count, seed=42)
    assert tuple(map(len, parts)) == counts
    ids = "\n".join(f"router_{number + 1:04d}" for number in parts.train)
    assert hashlib.sha256(ids.encode()).hexdigest() == digest


@given(st.integers(0, 300), st.integers(), st.floats(0, 0.49), st.floats(0, 0.5))
def test_three_parts_are_the_shuffled_rows(count: int, seed: int, val: float, test: float) -> None:
    parts = split_three(count, seed=seed, val_ratio=val, test_ratio=test)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    assert parts.train + parts.validation + parts.test == order
    assert (len(parts.validation), len(parts.test)) == (int(count * val), int(count * test))


COUNTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 60), min_size=1)


@given(COUNTS, st.integers(), st.floats(0, 0.99), st.booleans())
def test_a_tool_has_each_row_on_one_side(
    counts: dict[str, int], seed: int, ratio: float, strict: bool
) -> None:
    held = split_tools(counts, seed=seed, val_ratio=ratio, strict=strict)
    assert list(held) == list(counts)
    for tool, (train, val) in held.items():
        if counts[tool] > 1:
            assert sorted(train + val) == list(range(counts[tool]))
            assert len(val) == max(1, int(counts[tool] * ratio))
        else:
            assert (train, val) == ([0], [] if strict else [0])


GROUPS = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.sampled_from("pqrstuvw"), min_size=1), min_size=1
)


@given(GROUPS, st.integers(), st.floats(0, 0.99))
def test_no_group_is_on_both_sides(groups: dict[str, list[str]], seed: int, ratio: float) -> None:
    held = split_tools_by_group(groups, seed=seed, val_ratio=ratio)
    train = {groups[tool][row] for tool, parts in held.items() for row in parts.train}
    val = {groups[tool][row] for tool, parts in held.items() for row in parts.val}
    assert not train & val
    for tool, parts in held.items():
        assert sorted(parts.train + parts.val) == list(range(len(groups[tool])))
        assert parts.train
    assert held == split_tools_by_group(groups, seed=seed, val_ratio=ratio)
