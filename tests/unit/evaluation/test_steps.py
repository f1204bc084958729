"""Steps in reports: counted by hand in an environment that logs known ones."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.commands import envserver

from envserver import main
from envserver.evaluation.steps import Action, Steps, steps_of

SIM = ("--model", "sim", "--sim.latency_seconds", 0, "--workers.processes", 1)
WANDERING = '''
from envserver import Environment, Score, Task

class Wandering(Environment):
    """Searches twice for the same, fails once, and opens a page."""

    class Config(Environment.Config):
        directly: bool = False

    def baselines(self):
        return {"directly": {"directly": True}}

    def tasks(self, split):
        yield Task("solved", {}, {"reward": 1.0})
        yield Task("failed", {}, {"reward": 0.0})
        yield Task("silent", {}, {"reward": 1.0})

    async def rollout(self, task, run):
        await run.chat([{"role": "user", "content": "go"}])
        if task.id == "silent":
            return
        run.log_action("open", {"page": 1}, "the page")
        if not self.config.directly:
            run.log_action("search", {"for": "x"}, ["a", "b"])
            run.log_action("search", {"for": "x"}, ["a", "b"])
            run.log_action("search", {"for": "x"}, ["c"])
            run.log_action("open", {"page": 9}, None, error="no such page")
            run.log_action("reason", None, "")
        run.log_action("finalize", {}, "done")

    def score(self, task, result):
        return Score(reward=task.hidden["reward"])
'''


def test_steps_are_measured_against_the_shortest_success(tmp_path: Path) -> None:
    (tmp_path / "wandering.py").write_text(WANDERING)
    words = ("--env.group_size", 2, "--out", "run")
    ran = envserver("evaluate", "--env", "wandering.py", *SIM, *words, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    report = orjson.loads((tmp_path / "run" / "report.json").read_bytes())
    told = {name: (one["value"], one["tasks"]) for name, one in report["run"]["steps"].items()}
    assert told == {
        "steps": (6.0, 2),
        "steps of a success": (6.0, 1),
        "steps beyond the shortest success": (5.0, 1),  # the baseline's success has one
        "share with an error": (pytest.approx(1 / 6), 2),
        "share repeated": (pytest.approx(1 / 6), 2),
        "share useless": (pytest.approx(3 / 6), 2),
    }
    direct = report["baselines"]["directly"]["steps"]
    assert direct["steps beyond the shortest success"]["value"] == 0
    assert "| steps beyond the shortest success | 5.000 | 0.000 |" in (
        tmp_path / "run" / "report.md"
    ).read_text().replace(" [5.00, 5.00]", "")
    before = (tmp_path / "run" / "report.json").read_bytes()
    assert main(["evaluate", "report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.json").read_bytes() == before


def test_what_others_say_and_what_was_left_out_are_no_steps() -> None:
    said = [Action("user"), Action("finalize"), Action("actions_cut_off"), Action("say")]
    assert steps_of(said) == Steps(steps=1, errors=0, repeated=0, useless=1)
    assert steps_of([]) == Steps(steps=0, errors=0, repeated=0, useless=0)
