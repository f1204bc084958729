"""The tutorial works as it stands there, from rows to a trained model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from support.learning import tiny_model, variables
from support.pages import commands, write_files

from envserver import Result, Score
from envserver.cli.settings import load_settings
from envserver.registry import find

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
CORE, MODEL = PAGE.split("## 5. A model")
ELSEWHERE = ("make ", "source ", "mkdir ", "cd ")
"""Commands of the installation, which a test cannot wait for."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the tutorial, with its files."""
    written = write_files(PAGE, tmp_path)
    assert written == ["make_rows.py", "first_try.py", "sums.py", "serve.yaml"]
    subprocess.run([sys.executable, "-S", "make_rows.py"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(python: Path, lines: list[str]) -> str:
    """Runs the page's commands with the programs beside `python`; returns what they print."""
    given = [line for line in lines if not line.startswith(ELSEWHERE)]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euxc", "\n".join(given)],
        capture_output=True,
        text=True,
        check=False,
        env={**variables(), "PATH": path},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_its_files_are_an_environment(folder: Path) -> None:
    paid = {}
    for name in ("first_try.py", "sums.py"):
        environment = find(str(folder / name))()
        task = next(one for one in environment.tasks("train") if "+0?" in str(one.public))
        answer = task.hidden["answer"]
        outputs = (rf"\boxed{{{answer}}}", "boxed{-1}", f"What is {answer}+0?", "")
        scores = [environment.score(task, Result(output=output)) for output in outputs]
        paid[name] = [one.reward for one in scores if isinstance(one, Score)]
    assert paid["sums.py"] == [1.0, 0.0, 0.0, 0.0]
    assert paid["first_try.py"][:3] == [1.0, 0.0, 1.0]  # which the page shows to be a mistake
    splits = [len(list(environment.tasks(split))) for split in ("train", "validation", "test")]
    assert sum(splits) == 100 and splits[0] < 70
    settings = load_settings(["--config", "serve.yaml"], environ={}, folder=folder)
    assert settings.env.group_size == 8 and settings.rollouts.max_queued_groups == 12


@pytest.mark.thorough  # commands
def test_its_commands_work_without_a_model(folder: Path) -> None:
    told = run(Path(sys.executable), commands(CORE))
    assert "question echoed" in told and "The check fails." in told
    assert "All checks passed" in told
    groups = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    assert len([group for group in groups if "tokens" in group]) == 4
    assert "What is" in (folder / "sums.html").read_text()


@pytest.mark.slow
def test_a_model_learns_it(folder: Path, learn_python: Path) -> None:
    lines = commands(MODEL)
    assert lines.count("envserver models tiny out/tiny") == 1
    shutil.copytree(tiny_model(learn_python), folder / "out" / "tiny")
    run(learn_python, [line for line in lines if "models tiny" not in line])
    before, after = (
        json.loads((folder / "runs" / name / "report.json").read_text())
        for name in ("before", "after")
    )
    assert (folder / "out" / "learn" / "curves.png").exists()
    rewards = [one["run"]["overall"]["mean_reward"]["value"] for one in (before, after)]
    assert rewards[1] > rewards[0]
    lines = (folder / "out" / "learn" / "metrics.jsonl").read_text().splitlines()
    assert fmean(json.loads(line)["reward_mean"] for line in lines[-10:]) >= 0.8
