"""From one run with the simulated engine to every form of an export, each judged by its readers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserver import main
from envserver.export import StoredRollout, problems_of_trace, read_groups
from envserver.export.formats import FORMATS

FILES = [name for name in FORMATS if name not in ("inspect", "otlp")]
"""Inspect's logs need its package (tests/peers), and otlp sends instead of writing."""
Export = dict[str, Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("run") / "math.jsonl"
    words = ["--env.total_steps", "4", "--env.group_size", "3", "--env.include_actions", "true"]
    where = ["--env.data_path_to_save_groups", str(file), "--model", "sim"]
    assert main(["process", "--env", "math", *words, *where]) == 0
    return file


@pytest.fixture(scope="module")
def exports(run: Path) -> Export:
    made = {name: run.parent / name for name in FILES}
    for name, out in made.items():
        if name == "parquet":
            pytest.importorskip("pyarrow")
        assert main(["export", str(run), "--to", name, "--out", str(out)]) == 0
    return made


def stored(run: Path) -> dict[str, StoredRollout]:
    groups = read_groups([str(run)])
    return {rollout.rollout_id: rollout for group in groups for rollout in group.rollouts}


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    for shard in sorted(folder.glob("part-*.jsonl")):
        for line in shard.read_text().splitlines():
            yield json.loads(line)


@pytest.mark.parametrize("name", FILES)
def test_the_manifest_has_every_file(exports: Export, run: Path, name: str) -> None:
    folder = exports[name]
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {file["path"] for file in manifest["files"]} == there - {"MANIFEST.json"}
    for file in manifest["files"]:
        data = (folder / file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
    assert manifest["format"] == name
    assert manifest["counts"]["kept"] == manifest["counts"]["read"] == len(stored(run))


def test_atropos_groups_are_those_of_the_run(exports: Export, run: Path) -> None:
    lines = run.read_text().splitlines()
    assert list(rows(exports["atropos"])) == [json.loads(line) for line in lines]


def test_messages_are_the_conversations(exports: Export, run: Path) -> None:
    said = [(row["task_id"], row["reward"], row["messages"]) for row in rows(exports["messages"])]
    expected = [(one.task_id, one.reward, one.messages) for one in stored(run).values()]
    assert sorted(said, key=repr) == sorted(expected, key=repr)


def test_pairs_prefer_the_higher_reward(exports: Export) -> None:
    pairs = list(rows(exports["dpo"]))
    assert pairs
    for pair in pairs:
        assert pair["chosen_reward"] > pair["rejected_reward"]
        assert pair["prompt"] and pair["chosen"] != pair["rejected"]


def test_unified_trajectories_are_valid(exports: Export, run: Path) -> None:
    assert main(["validate", str(exports["unified"] / "math")]) == 0
    files = list((exports["unified"] / "math").glob("*.json"))
    assert len(files) == len(stored(run))
    answers = {json.loads(file.read_text())["metadata"]["rollout_id"] for file in files}
    assert answers == set(stored(run))


def test_traces_are_valid(exports: Export, run: Path) -> None:
    files = list(exports["traces"].glob("sim/*/run_*.json"))
    assert len(files) == len(stored(run))
    for file in files:
        assert problems_of_trace(json.loads(file.read_text())) == []


def test_parquet_has_the_tokens(exports: Export, run: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(exports["parquet"] / "data")
    by_id = stored(run)
    assert len(frame) == sum(max(1, len(one.rows)) for one in by_id.values())
    for row in frame.itertuples():
        source = by_id[row.rollout_id]
        assert row.reward == source.reward
        assert np.array_equal(row.tokens, source.rows[row.row].tokens)
        assert np.array_equal(row.mask, source.rows[row.row].mask != 0)
        assert np.array_equal(row.logprobs, source.rows[row.row].logprobs)


def test_the_page_has_every_rollout(exports: Export, run: Path) -> None:
    page = (exports["html"] / "index.html").read_text()
    assert all(rollout_id in page for rollout_id in stored(run))
    assert "<script" not in page
