"""`envserver sft build` and `preview`: rows per tool from unified trajectories."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from envserver_factory.sft_building import split_three, split_tools_by_group
from envserver_records.tasks import Json
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples
from support.in_process import Run

from envserver.export import problems_of

CASES = cases_of(__file__)

TEMPLATES = Path(__file__).with_name("templates.yaml").read_text()
Build = Callable[..., Json]


def _trajectory(task_id: str, *actions: Any, reward: float | None = None) -> Json:
    names = ("step", "tool", "input", "output")
    return {
        "schema_version": 1,
        "task_id": task_id,
        "domain": task_id.partition("-")[0],
        "question": f"Question of {task_id}?",
        "actions": [dict(zip(names, (n, *one), strict=True)) for n, one in enumerate(actions, 1)],
        "final_answer": "",
        "metadata": {"start_ts": 0.0, "end_ts": 1.0, "reward": reward},
    }


def _write(*trajectories: Json, folder: str = "unified") -> None:
    for one in trajectories:
        assert problems_of(one) == []
        path = Path(folder, one["domain"], f"{one['task_id']}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one), encoding="utf-8")


@pytest.fixture
def build(run: Run) -> Build:
    """Builds `unified` (another folder, too) by the templates; returns the rows of each file."""
    Path("templates.yaml").write_text(TEMPLATES)

    def built(out: str, words: str = "", source: str = "unified") -> Json:
        run(f"sft build {source} --templates templates.yaml --out {out} {words}")
        return {
            str(path.relative_to(out)): [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(Path(out).rglob("*.jsonl"))
        }

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
    _write(*maths, *hops, lone)
    return built


def _rows(files: Json) -> list[Json]:
    return [row for rows in files.values() for row in rows]


def test_rows_their_order_and_their_split_are_those_of_the_script(build: Build) -> None:
    files = build("sft")
    rng = random.Random(123)
    for count in (10, 10):  # those of `reason`, then those of `bash`
        order = list(range(count))
        rng.shuffle(order)
    assert files["bash/val.jsonl"] + files["bash/train.jsonl"] == [
        {
            "tool": "bash",
            "instruction": f"Next command for Question of math-{n:02d}?",
            "output": f"echo {n}",
            "meta": {"task_id": f"math-{n:02d}", "domain": "math", "step": 2},
        }
        for n in order
    ]
    assert files["reason/val.jsonl"][0]["instruction"].endswith("Context:")
    outputs = {row["output"] for row in files["reason/train.jsonl"]}
    assert outputs <= {f"echo {n}" for n in range(10)}
    (lone,) = files["load_context/train.jsonl"]
    assert files["load_context/val.jsonl"] == [lone]
    assert lone["output"] == '{"text": "ein Tisch, grün"}'
    assert "grün" in Path("sft/load_context/train.jsonl").read_text(encoding="utf-8")
    counts = {"reason": (9, 1), "bash": (9, 1), "reason_hop": (57, 3), "load_context": (1, 1)}
    summary = {tool: {"train": train, "val": val} for tool, (train, val) in counts.items()}
    assert Path("sft/SUMMARY.json").read_text() == json.dumps(summary, indent=2)
    assert build("sft") == files


def test_failures_and_blanks_are_no_rows_and_domains_and_prefixes_have_templates(run: Run) -> None:
    Path("templates.yaml").write_text(
        "tools:\n  reason: {instruction: 'T: {question}'}\n  open: {instruction: 'P: {path}'}\n"
        "  'tool:*': {instruction: 'T: {question}', response_from: action_call}\n"
        "domains:\n  math:\n    reason: {instruction: 'M: {question}'}\n"
    )
    refused = _trajectory("tau-1", ("tool:pay", {"to": "Ida"}, None), ("open", {}, "words"))
    refused["actions"][0]["error"] = "no such customer"
    older = _trajectory("router-1", ("reason", {}, {"error": "json", "message": "no plan"}))
    paid = _trajectory("tau-2", ("tool:pay", {"to": "Ida"}, "paid"), ("reason", {}, "so"))
    _write(refused, older, paid, _trajectory("math-1", ("reason", {}, "so")))
    said = " ".join(run("sft build unified --templates templates.yaml --out out").out.split())
    lines = [line for path in Path("out").rglob("*.jsonl") for line in path.open()]
    rows = {(row["tool"], row["instruction"][:2], row["output"]) for row in map(json.loads, lines)}
    call = '{"name": "pay", "arguments": {"to": "Ida"}}'
    assert rows == {("tool", "T:", call), ("reason", "T:", "so"), ("reason", "M:", "so")}
    assert "2 failed or refused actions; 1 with an empty placeholder" in said
    assert "tau: 2 rows (reason 1, tool 1)" in said
    assert "router: 0 rows (no action became one)" in said


def test_rows_of_a_task_stand_on_one_side_over_all_tools(build: Build) -> None:
    for n in range(9):  # rollouts of one task
        one = _trajectory(f"gaia-0-{n}", *[("bash", {"command": f"{n}{i}"}, "") for i in range(3)])
        one["metadata"]["task_id"] = "0"
        _write(one)
    files = build("sft", "--group-by task_id --val_ratio 0.3")
    sides: dict[str, set[str]] = {"train.jsonl": set(), "val.jsonl": set()}
    for name, rows in files.items():
        tasks = {row["meta"]["task_id"] for row in rows}
        sides[Path(name).name] |= {"gaia-0" if "gaia-0" in task else task for task in tasks}
    assert not sides["train.jsonl"] & sides["val.jsonl"]
    assert len(files["reason_hop/val.jsonl"]) >= 2 and files["bash/val.jsonl"]


def test_what_else_can_be_wanted(build: Build, run: Run) -> None:
    assert build("strict", "--strict-split")["load_context/val.jsonl"] == []

    kept = {row["meta"]["task_id"] for row in _rows(build("good", "--min-reward 0.8"))}
    assert kept == {"math-08", "math-09"}

    rows = {
        (row["meta"]["task_id"], row["meta"]["step"]): row
        for row in _rows(build("full", "--context --notes"))
    }
    assert rows["mhqa-07", 3]["instruction"] == "Question of mhqa-07? Notes: one of 7"

    said = build("said", "--form messages")["bash/val.jsonl"][0]
    assert [message["role"] for message in said["messages"]] == ["user", "assistant"]
    assert {"env", "task_id", "reward", "tool", "step"} < said.keys()

    preview = "sft preview unified --templates templates.yaml"
    row = json.loads(run(f"{preview} --tool bash --json").out)
    assert row["tool"] == "bash" and row["output"] == "echo 0"
    before = sorted(Path().iterdir())
    assert "decompose (30)" in run(preview).out
    assert sorted(Path().iterdir()) == before


def test_a_folder_is_built_again_but_another_is_left_alone(build: Build, run: Run) -> None:
    build("sft")
    Path("other").mkdir()
    Path("other/thesis.tex").write_text("mine")
    words = "sft build unified --templates templates.yaml"
    run(f"{words} --out other", status=2)
    assert [path.name for path in Path("other").iterdir()] == ["thesis.tex"]

    Path("unified/math/math-99.json").write_text('{"task_id": ')
    assert "math-99.json: not JSON" in run(f"{words} --out sft", status=2)
    assert json.loads(Path("sft/SUMMARY.json").read_text())["bash"] == {"train": 9, "val": 1}
    assert not list(Path().glob(".*"))


def test_a_wrong_template_is_named(build: Build, run: Run) -> None:
    for text, said in CASES["wrong_templates"].items():
        Path("wrong.yaml").write_text(text)
        assert said in run("sft build unified --templates wrong.yaml --out sft", status=2)


# Facts of the original scripts: ALikesToCode/CourseGPT-Pro-DSAI-Lab-Group-6, seed 42.
SPLITS = [
    (5, (5, 0, 0), "08d5762c7507195977bf9c72ed1b015b60047407014cb33c47f4bb30ca3bf62a"),
    (8189, (6962, 818, 409), "fd02047e3776cb11f90fcc5dadea4167ee867538d82bcdecca17acd7feaabcfa"),
]


@pytest.mark.parametrize(("count", "counts", "digest"), SPLITS)
def test_rows_are_split_as_there_too(count: int, counts: tuple[int, int, int], digest: str) -> None:
    parts = split_three(count, seed=42)
    assert tuple(map(len, parts)) == counts
    ids = "\n".join(f"router_{number + 1:04d}" for number in parts.train)
    assert hashlib.sha256(ids.encode()).hexdigest() == digest


GROUPS = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.sampled_from("pqrstuvw"), min_size=1), min_size=1
)


@settings(max_examples=examples(100))
@given(GROUPS, st.integers(), st.floats(0, 0.99))
def test_no_group_is_on_both_sides(groups: dict[str, list[str]], seed: int, ratio: float) -> None:
    held = split_tools_by_group(groups, seed=seed, val_ratio=ratio)
    train = {groups[tool][row] for tool, parts in held.items() for row in parts.train}
    assert not train & {groups[tool][row] for tool, parts in held.items() for row in parts.val}
    for tool, parts in held.items():
        assert sorted(parts.train + parts.val) == list(range(len(groups[tool])))
        assert parts.train
    assert held == split_tools_by_group(groups, seed=seed, val_ratio=ratio)


# `envserver sft router|math|code`: data sets prepared for fine-tuning, and where they are put

PLAN = CASES["plan"]
ROUTER = "sft router rows.jsonl --out out"


def _router_rows(count: int, *wrong: Json) -> None:
    rows = [{"id": n, **PLAN, "user_query": f" query {n}\n"} for n in range(count)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, *wrong])
    Path("rows.jsonl").write_text(text, encoding="utf-8")


def _lines(name: str) -> list[Any]:
    text = Path("out", f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _summary() -> Json:
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
    changes: list[Json] = CASES["not_whole"]
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


def test_a_folder_is_put_on_the_hub_in_a_commit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    calls: list[Json] = []

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
    for words, said in CASES["wrong_flags"].items():
        assert said in run(f"{ROUTER} {words}", status=2)
    Path("rows.jsonl").write_text('{"user_query": "q"}\n')
    assert "no route_plan" in run(ROUTER, status=2)
    run("sft router none.jsonl --out out", status=2)
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]
