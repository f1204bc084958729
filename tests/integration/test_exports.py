"""Exports of whole runs: in every form right, and the same however often the run was killed."""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.commands import read_jsonl, running, typed

from envserver import main
from envserver.export import problems_of_trace, read_groups
from envserver.export.formats import FORMATS


def test_every_form_has_the_whole_run(tmp_path: Path) -> None:
    """Each form by itself, with odd data: tests/unit/export."""
    run = tmp_path / "math.jsonl"
    flags = "--env.total_steps 4 --env.group_size 3 --env.include_actions true --model sim"
    assert main(["process", "--env", "math", *flags.split(), "--out", str(run)]) == 0
    stored = {one.rollout_id: one for group in read_groups([str(run)]) for one in group.rollouts}
    # Inspect's logs need its package (tests/peers), and otlp sends instead of writing.
    forms = {*FORMATS} - {"inspect", "otlp"}
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


ENVIRONMENT = '''
from envserver import Environment, Score, Task

class Counting(Environment):
    """Say a number, twice; many tasks ask the same."""

    def tasks(self, split):
        for n in range(self.config.total_steps or 7):
            said = str(n % 7)
            yield Task(f"count-{n}", {"question": f"Say {said}."}, {"answer": said})

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["answer"]}] * 2

    def rollout(self, task, run):
        messages = [{"role": "user", "content": task.public["question"]}]
        for _ in range(2):
            reply = run.chat_blocking(messages)
            messages += [reply.message, {"role": "user", "content": "Again."}]
            run.log_action("say", {}, reply.content)
        return reply.content

    def score(self, task, result):
        right = task.hidden["answer"] in (result.output or "").split()
        return Score(reward=float(right), components={"right": float(right)})
'''
PROCESS = (
    "process --env counting.py --model sim --env.group_size 3 --resume --rollouts.max_concurrent 8"
    " --env.include_actions --env.total_steps {groups} --out {name}.jsonl {speed}"
)
OF_THE_MOMENT = frozenset(
    {"created_at", "seconds", "model_seconds", "scoring_seconds", "start_ts", "end_ts", "ts"}
    | {"timestamp", "elapsed_seconds", "run_id", "chain", "group_digest", "started_at", "timings"}
)
"""Keys of what differs between any two runs: when they ran. `run_id` of a trace tells the time, and
digests cover it."""


@pytest.mark.parametrize(
    ("kills", "groups"), [(3, 16), pytest.param(20, 160, marks=pytest.mark.slow)]
)
@pytest.mark.thorough
def test_exports_of_a_killed_and_resumed_run_equal_those_of_an_undisturbed_one(
    tmp_path: Path, kills: int, groups: int
) -> None:
    (tmp_path / "counting.py").write_text(ENVIRONMENT)
    slow = "--sim.seconds_per_token 0.004"
    slow = PROCESS.format(groups=groups, name="killed", speed=slow)
    killed = tmp_path / "killed.jsonl"
    moments = random.Random(kills)
    for number in range(1, kills + 1):
        with running(*shlex.split(slow), folder=tmp_path) as process:
            wanted = moments.randint(*((groups - 8) * (number - back) // kills for back in (1, 0)))
            process.until(lambda wanted=wanted: _groups_in(killed) >= wanted)
            time.sleep(moments.uniform(0, 0.2))
            process.kill()
    for name in ("killed", "whole"):
        typed(PROCESS.format(groups=groups, name=name, speed="--sim.latency_seconds 0"), tmp_path)
    for to in ("atropos", "messages", "unified", "dpo", "traces"):
        filters = [(), ("--where", "reward > 0", "--per_group", "best")]
        # Which of two equal conversations stays is told by no other format's rows.
        filters += [("--dedupe",)] if to == "messages" else []
        for more in filters:
            exports = [_export(tmp_path, name, to, more) for name in ("killed", "whole")]
            assert exports[0] == exports[1], (to, more)
            assert exports[0] or to == "dpo", (to, more)


def _groups_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _export(folder: Path, name: str, to: str, more: tuple[str, ...]) -> Counter[bytes]:
    """The rows as a set, each as often as it is there, without what tells of the moment."""
    out = folder / f"{name}-{to}-{len(more)}.jsonl"
    assert (
        main(["export", str(folder / f"{name}.jsonl"), "--to", to, "--out", str(out), *more]) == 0
    )
    rows = [_timeless(row) for row in read_jsonl(out)]
    return Counter(orjson.dumps(row, option=orjson.OPT_SORT_KEYS) for row in rows)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in OF_THE_MOMENT}
    return [_timeless(one) for one in value] if isinstance(value, list) else value
