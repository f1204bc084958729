"""`envserver evaluate` with several environments, its report made anew, and two runs compared."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.commands import envserver

from envserver import main

SIM = ("--model", "sim", "--sim.latency_seconds", 0, "--workers.processes", 1)
BROKEN = '''
from envserver import Environment, Score, Task

class Broken(Environment):
    """No attempt comes to an end."""

    def tasks(self, split):
        yield from (Task(f"t-{n}", {}) for n in range(2))

    async def rollout(self, task, run):
        raise RuntimeError("no such tool")

    def score(self, task, result):
        return Score(reward=1.0)
'''
EASY = """
environment: math
env: {total_steps: 3, group_size: 2, data_set: sample}
sampling: {temperature: 0.5}
openai: {base_url: http://localhost:1/v1}
"""
REPORTS = ("report.json", "report.md", "report.html")


def folder_of_environments(place: Path) -> Path:
    """One that cannot, one that can, and what is none."""
    (place / "envs").mkdir()
    (place / "envs" / "broken.py").write_text(BROKEN)
    (place / "envs" / "easy.yaml").write_text(EASY)
    (place / "envs" / "_notes.py").write_text("1 / 0")
    (place / "envs" / "README.md").write_text("...")
    return place / "envs"


def test_a_folder_is_evaluated_whole_and_its_report_follows_from_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of_environments(tmp_path)
    words = ("--rollouts.max_attempts", 1, "--prices.prompt", 3, "--prices.completion", 6)
    ran = envserver("evaluate", "--env", "envs", *SIM, *words, "--out", "run", folder=tmp_path)
    assert ran.returncode == 1, ran.stderr  # one environment failed: said, and the other is done
    run = tmp_path / "run"
    report = orjson.loads((run / "report.json").read_bytes())
    broken, easy = report["parts"]
    assert (broken["name"], broken["run"]["overall"]) == ("broken", None)
    assert broken["run"]["counts"]["lost"] == 8
    assert (easy["name"], easy["env"], easy["rules"]["group_size"]) == ("easy", "math", 2)
    assert easy["settings"]["sampling"]["temperature"] == 0.5
    costs = easy["run"]["costs"]
    tokens = costs["total_prompt_tokens"] * 3 + costs["total_completion_tokens"] * 6
    assert report["totals"]["cost"] == pytest.approx(tokens / 1e6)
    assert (report["average"]["value"], report["simulated"]) == (
        easy["run"]["overall"]["mean_reward"]["value"],
        True,
    )
    assert "## easy" in (run / "report.md").read_text()

    monkeypatch.chdir(tmp_path)
    before = {name: (run / name).read_bytes() for name in REPORTS}
    for name in REPORTS:
        (run / name).unlink()
    assert main(["evaluate", "report", "run"]) == 0
    assert {name: (run / name).read_bytes() for name in REPORTS} == before
    assert main(["evaluate", "report", "run", "--failures", "zero"]) == 0
    other = orjson.loads((run / "report.json").read_bytes())["parts"][0]
    assert other["run"]["overall"]["rollouts"] == 8

    capsys.readouterr()
    assert main(["evaluate", "compare", "run/easy", "run/easy/groups.jsonl", "--json"]) == 0
    same = orjson.loads(capsys.readouterr().out)["parts"][0]["reward"]
    assert (same["tasks"], same["difference"]["value"], same["test"]["p_value"]) == (3, 0, 1)
    assert main(["evaluate", "compare", "run", "run/easy", "--out", "cmp"]) == 0
    assert "Only run has broken" in (tmp_path / "cmp" / "comparison.md").read_text()
    assert (tmp_path / "cmp" / "comparison.html").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--env", "empty"], "There is no environment in"),
        (["--env", "math,nonsense"], "no environment 'nonsense'"),
        (["--env", "math,math", "--out", "old"], "holds an evaluation"),
        (["--env", "math", "--out", "old", "--resume"], "of several environments"),
        (["compare", "nowhere", "old"], "no nowhere"),
        (["compare", "old", "old"], "holds no evaluation"),
        (["report", "nowhere"], "holds no evaluation"),
        (["compare"], "A is needed"),
        ([], "--env NAME"),
    ],
)
def test_what_cannot_be_meant_is_told(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text('{"parts": ["math", "code"]}')
    sim = ["--model", "sim"] if "--env" in words else []
    assert main(["evaluate", *words, *sim]) in (1, 2)
    assert told in capsys.readouterr().err
