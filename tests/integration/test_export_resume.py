"""`process` killed at random moments and resumed: its exports are those of an undisturbed run."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.commands import envserver, read_jsonl, running, until

from envserver import main

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
    "process", "--env", "counting.py", "--model", "sim", "--env.group_size", 3, "--resume",
    "--rollouts.max_concurrent", 8, "--env.include_actions",
)  # fmt: skip
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
    words = (*PROCESS, "--env.total_steps", groups, "--env.data_path_to_save_groups")
    slow = (*words, "killed.jsonl", "--sim.seconds_per_token", 0.004)
    killed = tmp_path / "killed.jsonl"
    moments = random.Random(kills)
    for number in range(1, kills + 1):
        with running(*slow, folder=tmp_path) as process:
            wanted = moments.randint(*((groups - 8) * (number - back) // kills for back in (1, 0)))
            until(
                lambda wanted=wanted: _groups_in(killed) >= wanted,
                process.output,
                alive=process.process,
            )
            time.sleep(moments.uniform(0, 0.2))
            process.kill()
    ran = envserver(*words, "killed.jsonl", "--sim.latency_seconds", 0, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    ran = envserver(*words, "whole.jsonl", "--sim.latency_seconds", 0, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
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
