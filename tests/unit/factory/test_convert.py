"""`envserver convert` and `validate`: trajectories of others, and what is none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from envserver_factory.publishing.models import Result, split_card, with_results
from envserver_factory.trajectories import unified_of_foreign
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples
from support.hub import running_hub
from support.in_process import Run
from support.models_on_disk import write_model
from support.waiting import PATIENCE

from envserver.export import problems_of

CASES = cases_of(__file__, "trajectories.json")
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
    for line, number, said in zip(told, (7, 8), ("twice", "not JSON"), strict=True):
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


# `envserver publish`: what goes to the hub, what never does, and what the card says of results

RESULT = Result("math", "test", 8, 16, 0.625, 0.5, 0.75, {1: 0.6, 2: 0.7})
CARD = "---\nlibrary_name: transformers\ntags: [merge]\n---\n\n# A model\n\nIts text.\n"
PUBLISHED = ("model.safetensors", "config.json", "README.md", "tokenizer.json")
KEPT = ("optimizer.pt", "trainer_state.json", ".env", "notes.txt", "checkpoint-5/model.safetensors")
M = Path("m")


@pytest.fixture
def model(run: Run) -> Path:
    """A finished model with much beside it that must stay here."""
    write_model(M, {"model.norm.weight": ("F32", np.zeros(4, np.float32))})
    (M / "README.md").write_text(CARD)
    (M / "tokenizer.json").write_text("{}")
    (M / "checkpoint-5").mkdir()
    for name in (*KEPT, "rng_state.pth", "checkpoint-5/optimizer.pt"):
        (M / name).write_text("x")
    return M


def test_a_dry_run_shows_what_is_uploaded_and_what_is_not(model: Path, run: Run) -> None:
    before = {path: path.read_bytes() for path in M.rglob("*") if path.is_file()}
    told = run("publish m me/x --dry_run --license mit --base_model them/base")
    header, body = split_card(told.out)
    assert header["license"] == "mit" and header["base_model"] == "them/base"
    assert header["tags"] == ["merge"] and "Its text." in body
    up, _, left = told.err.partition("Not uploaded")
    assert "a private model" in up
    for name in PUBLISHED:
        assert name in up and name not in left.replace("checkpoint-5/model.safetensors", "")
    assert all(name in left and name not in up for name in KEPT)
    assert before == {path: path.read_bytes() for path in M.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_a_publication_is_one_commit_of_what_the_dry_run_shows(model: Path) -> None:
    """huggingface_hub itself, against a stand-in for the hub."""
    pytest.importorskip("huggingface_hub")
    with running_hub() as hub:
        done = subprocess.run(
            [sys.executable, "-m", "envserver", "publish", "m", "me/x"],
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_of_a_stand_in"},
            check=True, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
    path, token, body = next(one for one in hub.asked if "/repos/" in one[0])
    assert (path, token) == ("/api/repos/create", "Bearer hf_of_a_stand_in")
    asked = json.loads(body)  # newer libraries say it by `visibility`
    assert asked.get("private") is True or asked.get("visibility") == "private"
    assert asked.get("type", "model") == "model"
    committed = hub.committed()
    assert committed.pop("README.md").decode().startswith("---\nlibrary_name: transformers")
    for name in {*PUBLISHED} - {"README.md"}:
        assert committed[name] == (M / name).read_bytes()
    assert committed.keys() <= {path.name for path in M.iterdir()} - {*KEPT[:3]}
    assert done.stdout.strip().endswith("a" * 40)


def test_a_public_repository_gets_nothing_unasked(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_library: Any = pytest.importorskip("huggingface_hub")
    real = hub_library.HfApi
    with running_hub(private=False) as hub:
        monkeypatch.setattr(hub_library, "HfApi", lambda: real(endpoint=hub.url, token="t" * 20))
        assert "is public: nothing was uploaded" in run("publish m me/x", status=2)
        assert not [path for path, _, _ in hub.asked if "/commit/" in path]
        run("publish m me/x --public")
        assert "model.safetensors" in hub.committed()


INDEX, ADAPTER = "model.safetensors.index.json", "adapter_config.json"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("README.md", "hf_" + "a" * 34, "a token of the Hugging Face hub"),
        ("tokenizer.json", '{"key": "AKIA' + "A" * 16 + '"}', "a key of AWS"),
        ("LICENSE", "-----BEGIN RSA PRIVATE KEY-----", "a private key"),
        ("metrics.jsonl", '{"key": "of-this-machine-7"}', "$MY_API_KEY"),
        (ADAPTER, '{"base_model_name_or_path": "/home/me/base"}', "--base_model"),
        ("README.md", "---\nbase_model: /home/me/base\n---\n", "--base_model"),
        ("README.md", "---\ndate: 2026-13-01\n---\n", "not YAML"),
        ("README.md", "caf\xe9", "cannot be read"),
        (".work/started.json", "{}", "an unfinished training"),
        (INDEX, '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "is missing"),
    ],
)
def test_what_must_not_be_published_is_refused_with_its_file(
    name: str, text: str, why: str, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "of-this-machine-7")
    (M / name).parent.mkdir(exist_ok=True)
    (M / name).write_text(text, encoding="latin-1")
    assert why in run("publish m me/x --dry_run", status=2)


def test_a_link_out_of_the_folder_is_not_followed(model: Path, run: Run) -> None:
    Path("private.txt").write_text("a diary")
    link = M / "vocab.txt"
    link.symlink_to(Path("private.txt").absolute())
    assert "vocab.txt is a link to" in run("publish m me/x --dry_run", status=2)
    link.unlink()
    link.symlink_to("tokenizer.json")
    run("publish m me/x --dry_run")


def test_results_are_in_the_card_as_the_hub_reads_them() -> None:
    card_library: Any = pytest.importorskip("huggingface_hub")
    other = {
        "task": {"type": "text-generation"},
        "dataset": {"type": "gsm8k", "name": "GSM8K"},
        "metrics": [{"type": "accuracy", "value": 0.5}],
    }
    index = yaml.safe_dump({"model-index": [{"name": "x", "results": [other]}]})
    text = with_results(CARD.replace("tags:", f"{index}tags:"), "x", [RESULT])
    assert with_results(text, "x", [RESULT]) == text
    read = card_library.ModelCard(text).data
    assert read.model_name == "x"
    found = {(one.dataset_type, one.metric_type): one for one in read.eval_results}
    assert found["gsm8k", "accuracy"].metric_value == 0.5
    mine = found["envserver/math", "mean_reward"]
    assert (mine.metric_value, mine.dataset_split) == (0.625, "test")
    assert mine.metric_args == {"tasks": 8, "attempts": 16, "low": 0.5, "high": 0.75}
    assert found["envserver/math", "pass@2"].metric_value == 0.7
    assert "| math | test | 8 | 16 | 0.625 | 0.500 to 0.750 | @1 0.600, @2 0.700 |" in text
    assert text.count("Its text.") == 1
