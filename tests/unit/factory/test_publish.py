"""`envserver publish`: what goes to the hub, what never does, and what the card says of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from envserver_factory.publishing.model_card import Result, split_card, with_results
from support.hub import running_hub
from support.in_process import Run
from support.models_on_disk import write_model
from support.waiting import PATIENCE

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
        (".work/started.json", "{}", "a training that has not ended"),
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
