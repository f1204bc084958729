"""Exports of whole runs: in every form right, and the same however often the run was killed."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from envserver_factory.exporting.formats import FORMATS
from support.commands import read_jsonl

from envserver import main
from envserver.export import problems_of_trace, read_groups


def test_every_form_has_the_whole_run(tmp_path: Path) -> None:
    """Each form by itself, with odd data: tests/unit/export."""
    run = tmp_path / "math.jsonl"
    flags = "--env.total_steps 4 --env.group_size 3 --env.include_actions true --model sim"
    assert main(["process", "--env", "math", *flags.split(), "--out", str(run)]) == 0
    stored = {one.rollout_id: one for group in read_groups([str(run)]) for one in group.rollouts}
    # Inspect's logs need its package (tests/peers).
    forms = {*FORMATS} - {"inspect"}
    forms -= {"parquet"} if find_spec("pyarrow") is None else set()
    for name in forms:
        folder = tmp_path / name
        assert main(["export", str(run), "--to", name, "--out", str(folder)]) == 0
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        paths = (path for path in folder.rglob("*") if path.is_file())
        there = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        del there["MANIFEST.json"]
        assert {file["path"]: (file["bytes"], file["sha256"]) for file in manifest["files"]} == {
            path: (len(data), hashlib.sha256(data).hexdigest()) for path, data in there.items()
        }
        assert manifest["format"] == name
        assert manifest["counts"]["kept"] == manifest["counts"]["read"] == len(stored)

    def rows(name: str) -> list[dict[str, Any]]:
        return [
            row for path in sorted((tmp_path / name).glob("part-*")) for row in read_jsonl(path)
        ]

    assert rows("atropos") == read_jsonl(run)
    assert main(["validate", str(tmp_path / "unified" / "math")]) == 0
    documents = map(json.loads, map(Path.read_text, (tmp_path / "unified/math").glob("*.json")))
    assert sorted(one["metadata"]["rollout_id"] for one in documents) == sorted(stored)
    traces = [json.loads(file.read_text()) for file in tmp_path.glob("traces/sim/*/run_*.json")]
    assert [problems_of_trace(trace) for trace in traces] == [[]] * len(stored)
    said = [(row["task_id"], row["reward"], row["messages"]) for row in rows("messages")]
    expected = [(one.task_id, one.reward, one.messages) for one in stored.values()]
    assert sorted(said, key=repr) == sorted(expected, key=repr)
    assert all(one in (tmp_path / "html" / "index.html").read_text() for one in stored)
    pairs = rows("dpo")
    assert pairs and all(pair["chosen_reward"] > pair["rejected_reward"] for pair in pairs)
    if "parquet" in forms:  # the values: tests/unit/export/test_export_parquet.py
        frame = pytest.importorskip("pandas").read_parquet(tmp_path / "parquet" / "data")
        assert len(frame) == sum(max(1, len(one.rows)) for one in stored.values())
