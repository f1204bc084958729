"""Exports for the hub: the folder as it would be pushed, its card, and what must not be in it."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from support.hub import Hub, running_hub
from support.waiting import PATIENCE

from envserver import main

MESSAGES = [
    {"role": "user", "content": "What is six times seven?"},
    {"role": "assistant", "content": "It is 42."},
]


def groups(
    path: Path, *, env: str = "math", model: str = "m", split: str = "train", **more: Any
) -> Path:
    """A file of two groups of two rollouts, with rewards 0 and 1."""
    lines = []
    for number in range(2):
        rollouts = [
            {"rollout_id": f"g{number}-r{row}", "rows": [row], "reward": float(row), "turns": 1}
            for row in range(2)
        ]
        facts = {"group_id": f"g{number}", "env": env, "task_id": f"t{number}", "split": split}
        facts |= {"seed": 0, "model": model, "policy_version": number, "created_at": 1.7e9, **more}
        lines.append(
            {
                "tokens": [[1, 2, 3]] * 2,
                "masks": [[-100, 2, 3]] * 2,
                "inference_logprobs": [[1.0, -0.5, -0.5]] * 2,
                "messages": [MESSAGES] * 2,
                "scores": [0.0, 1.0],
                "envserver": {**facts, "index": number, "rollouts": rollouts},
            }
        )
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n")
    return path


def dry_run(source: Path, out: Path, *words: str, to: str = "messages") -> int:
    where = ["--push_to_hub", "me/rollouts", "--dry_run", "--out", str(out)]
    return main(["export", str(source), "--to", to, *where, *words])


def header(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


@pytest.mark.parametrize("to", ["messages", "parquet"])
def test_a_dry_run_writes_what_datasets_can_load(tmp_path: Path, to: str) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("pyarrow")
    source, out = groups(tmp_path / "groups.jsonl"), tmp_path / "out"
    assert dry_run(source, out, "--min_reward", "0.5", to=to) == 0
    card = (out / "README.md").read_text()
    [config] = header(card)["configs"]
    [files] = config["data_files"]
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == [files["split"]] == ["train"]
    assert loaded["train"].num_rows == 2
    assert set(loaded["train"]["reward"]) == {1.0}
    said = loaded["train"][0]["messages"]
    assert [(one["role"], one["content"]) for one in said] == [
        (one["role"], one["content"]) for one in MESSAGES
    ]
    for name in loaded["train"].column_names:
        assert f"| `{name}` |" in card
    listed = {file["path"] for file in json.loads((out / "MANIFEST.json").read_text())["files"]}
    assert listed == {
        path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()
    } - {"MANIFEST.json"}


def test_a_card_tells_what_it_is_made_of(tmp_path: Path) -> None:
    source, out = groups(tmp_path / "groups.jsonl", split="test"), tmp_path / "out"
    evaluation = tmp_path / "exam.txt"
    evaluation.write_text("one two three four five six seven eight nine ten eleven twelve thirteen")
    assert dry_run(source, out, "--against", str(evaluation), "--where", "turns < 6") == 0
    card = (out / "README.md").read_text()
    told = header(card)
    assert told["pretty_name"] == "rollouts" and told["license"] == "unknown"
    assert told["configs"][0]["data_files"][0]["split"] == "test"
    assert "math" in told["tags"] and told["size_categories"] == ["n<1K"]
    assert "| `math` | 4 | 2 | 0.500 |" in card
    assert "4 rows; 12 tokens in 4 training rows, of which 8 were sampled" in card
    assert "- Models: `m`; policy versions: 0 to 1" in card
    assert "- `where`: `turns < 6`" in card
    assert "13 words in a row in common with `exam.txt`" in card
    assert "0.9 to 1.0" in card


GAME = {"low": -2.0, "high": 2.0, "solved_at": 1.0}
ENDLESS = {"low": 0.0, "high": None, "solved_at": 0.5}


@pytest.mark.parametrize(
    ("ranges", "counts"),
    [
        ([GAME], {"0.0 to 0.4": 2, "0.8 to 1.2": 2, "-2.0 to -1.6": 0}),
        ([ENDLESS], {"0 to 0.05": 2, "0.45 to 0.5": 0}),
        (
            [GAME, None],
            {"0 % to 10 %": 2, "50 % to 60 %": 2, "70 % to 80 %": 2, "90 % to 100 %": 2},
        ),
    ],
)
def test_a_card_counts_rewards_on_the_range_that_the_environment_declares(
    tmp_path: Path, ranges: list[Any], counts: dict[str, int]
) -> None:
    sources = []
    for number, bounds in enumerate(ranges):
        more = {"reward_range": bounds} if bounds else {}
        sources.append(str(groups(tmp_path / f"{number}.jsonl", env=f"e{number}", **more)))
    out = tmp_path / "out"
    where = ["--push_to_hub", "me/rollouts", "--dry_run", "--out", str(out)]
    assert main(["export", *sources, "--to", "messages", *where]) == 0
    card = (out / "README.md").read_text()
    shown = {
        name.rstrip(): int(count)
        for name, count in re.findall(r"(?m)^(.+ to \S+(?: %)?) .* (\d+)$", card)
    }
    assert shown.items() >= counts.items()
    assert ("Below that: 0; above: 2." in card) == (ranges == [ENDLESS])
    assert ("From the lowest to the highest" in card) == (len(ranges) > 1)


def test_nothing_of_this_machine_and_no_secret_is_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody_else")
    source, out = groups(tmp_path / "groups.jsonl"), tmp_path / "out"
    assert dry_run(source, out) == 0
    everything = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert str(tmp_path).encode() not in everything
    assert b"hf_of_nobody_else" not in everything


def test_names_from_the_data_are_no_markup_and_end_no_header(tmp_path: Path) -> None:
    hostile = "x`|\n---\nlicense: mit\n# y <script>"
    source = groups(tmp_path / "groups.jsonl", env=hostile, model=hostile)
    assert dry_run(source, tmp_path / "out", "--title", hostile) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert header(card)["license"] == "unknown"
    assert header(card)["tags"][-1] == "x-license-mit-y-script"
    body = card.split("\n---\n", 1)[1]
    assert "`x'' --- license: mit # y <script>`" in body
    assert not any(line.startswith(("---", "# y", "license")) for line in body.splitlines())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--push_to_hub", "no-owner", "--dry_run"], "OWNER/NAME"),
        (["--dry_run"], "--dry_run needs --push_to_hub"),
        (["--push_to_hub", "me/x", "--dry_run", "--out", "one.jsonl"], "Only a folder"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_any_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = groups(tmp_path / "groups.jsonl")
    out = [] if "--out" in words else ["--out", "out"]
    assert main(["export", str(source), "--to", "messages", *out, *words]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["groups.jsonl"]


def test_pages_have_a_card_without_splits(tmp_path: Path) -> None:
    source = groups(tmp_path / "groups.jsonl")
    assert dry_run(source, tmp_path / "out", to="html") == 0
    told = header((tmp_path / "out" / "README.md").read_text())
    assert "configs" not in told and told["viewer"] is False


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as server:
        yield server


def test_a_push_is_one_commit_of_the_folder(tmp_path: Path, hub: Hub) -> None:
    pytest.importorskip("huggingface_hub")
    source, out = groups(tmp_path / "groups.jsonl"), tmp_path / "out"
    words = ["--to", "messages", "--out", str(out), "--push_to_hub", "me/x"]
    subprocess.run(
        [sys.executable, "-m", "envserver", "export", str(source), *words],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_of_a_stand_in"},
        check=True,
        timeout=PATIENCE,
    )
    [(token, body)] = [one[1:] for one in hub.asked if one[0] == "/api/repos/create"]
    assert token == "Bearer hf_of_a_stand_in"
    assert json.loads(body)["type"] == "dataset"
    [commit] = [body for path, _, body in hub.asked if path == "/api/datasets/me/x/commit/main"]
    pushed = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in map(json.loads, commit.splitlines())
        if line["key"] == "file"
    }
    assert pushed == {path.name: path.read_bytes() for path in out.iterdir()}
    assert b"hf_of_a_stand_in" not in commit
