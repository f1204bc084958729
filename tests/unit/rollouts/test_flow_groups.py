"""Real groups that lack rollouts: their records say why."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import envserver, read_jsonl

ENVIRONMENT = '''
import asyncio, os
from pathlib import Path
from envserver import Environment, Score, Task

class Uneven(Environment):
    """One rollout of each group does not end, or raises."""

    class Config(Environment.Config):
        folder: str = "."

    def tasks(self, split):
        for name in ("fine", "slow", "broken"):
            yield Task(name, {"name": name}, {})

    async def rollout(self, task, run):
        answer = await run.chat([{"role": "user", "content": "hi"}])
        if task.public["name"] != "fine" and self.first(task.public["name"]):
            if task.public["name"] == "broken":
                raise ValueError("no such tool")
            await asyncio.Event().wait()
        return answer.content

    def first(self, name):
        try:
            os.close(os.open(Path(self.config.folder) / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def score(self, task, result):
        return Score(reward=0.5)
'''


def test_a_group_that_lacks_rollouts_says_which_and_why(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(ENVIRONMENT)
    ran = envserver(
        "process", "--env", "uneven.py", "--env.folder", tmp_path, "--model", "sim",
        "--sim.latency_seconds", 0, "--workers.processes", 1, "--env.group_size", 4,
        "--env.data_path_to_save_groups", "out.jsonl", "--rollouts.max_attempts", 1,
        "--rollouts.min_group_size", 3, "--rollouts.straggler_grace_seconds", 5,
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said = {line["envserver"]["task_id"]: line for line in read_jsonl(tmp_path / "out.jsonl")}
    lost = {name: line["envserver"]["lost"] for name, line in said.items()}
    assert lost == {"fine": {}, "slow": {"straggler": 1}, "broken": {"agent_error": 1}}
    for name, line in said.items():
        assert line["envserver"]["asked"] == 4
        assert len(line["scores"]) == (4 if name == "fine" else 3)
    assert "straggler" in ran.stderr


BURNING = '''
import os
from pathlib import Path
from envserver import Environment, Score, Task

class Burning(Environment):
    """The text of one rollout keeps its scorer busy for ever."""

    score_cpu_seconds = 1.0

    class Config(Environment.Config):
        folder: str = "."

    def tasks(self, split):
        yield Task("one", {}, {})

    async def rollout(self, task, run):
        answer = await run.chat([{"role": "user", "content": "hi"}])
        try:
            os.close(os.open(Path(self.config.folder) / "first", os.O_CREAT | os.O_EXCL))
            return "burn"
        except FileExistsError:
            return answer.content

    def score(self, task, result):
        while result.output == "burn":
            pass
        return Score(reward=0.5)
'''


def test_a_text_that_uses_up_the_scorers_time_scores_zero_with_a_flag(tmp_path: Path) -> None:
    (tmp_path / "burning.py").write_text(BURNING)
    ran = envserver(
        "process", "--env", "burning.py", "--env.folder", tmp_path, "--model", "sim",
        "--sim.latency_seconds", 0, "--workers.processes", 1, "--env.group_size", 4,
        "--env.data_path_to_save_groups", "out.jsonl",
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert sorted(line["scores"]) == [0.0, 0.5, 0.5, 0.5]
    flags = [set(rollout["flags"]) for rollout in line["envserver"]["rollouts"]]
    assert sorted("scorer_killed" in some for some in flags) == [False, False, False, True]
    assert line["envserver"]["lost"] == {}


ASKING = '''
import asyncio
from envserver import Environment, Score, Task

class Asking(Environment):
    """One agent retries every error for ever; another is refused thrice at once, and goes on."""

    def tasks(self, split):
        yield Task("one", {}, {})

    async def rollout(self, task, run):
        async def ask():
            try:
                await run.client.chat.completions.create(
                    model=run.model, messages=[{"role": "user", "content": "hi"}]
                )
            except Exception as error:
                return error

        if run.rollout_id.endswith("0"):
            await asyncio.gather(*(ask() for _ in range(4)))
            await asyncio.sleep(5)
            return "done"
        while True:
            await ask()
            await asyncio.sleep(0.3)

    def score(self, task, result):
        return Score(reward=float(result.output == "done" and not result.truncated))
'''


@pytest.mark.thorough
def test_an_agent_that_keeps_asking_after_its_last_turn_is_ended_and_scored(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    ran = envserver(
        "process", "--env", "asking.py", "--model", "sim", "--sim.latency_seconds", 0,
        "--workers.processes", 1, "--env.group_size", 2, "--env.total_steps", 1,
        "--env.max_turns", 1, "--env.worker_timeout", 3600,
        "--env.data_path_to_save_groups", "out.jsonl",
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert sorted(line["scores"]) == [0.0, 1.0]
    assert [one["limit"] for one in line["envserver"]["rollouts"]] == ["turns", "turns"]
    assert sorted(one["truncated"] for one in line["envserver"]["rollouts"]) == [False, True]
    assert "attempt" not in ran.stderr, "none failed"
