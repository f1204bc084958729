"""Real groups that lack rollouts: their records say why."""

from __future__ import annotations

from pathlib import Path

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
