"""`--track` with the real packages, offline: what they wrote is read back by their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.foreign_trainers import ROOT, SUPPORT, printed

SECRET = "sk-" + "a1b2c3d4" * 4
TRL = ["step", "prompt", "completion", "reward", "advantage"]
OURS = ["components", "environment", "task_id", "group_id", "rollout", "policy_version", "end"]


def alone(folder: Path, *command: object) -> str:
    """Runs a command without anything that the user has set for a tracker; returns its stdout."""
    theirs = ("WANDB_", "TRACKIO_", "MLFLOW_", "HF_")
    environment = {name: one for name, one in os.environ.items() if not name.startswith(theirs)}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    ours = (str(ROOT / one) for one in (".", "clients", "tools", "environments"))
    environment |= {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(ours)}
    return printed(*command, folder=folder, env=environment, seconds=None)


@pytest.fixture(scope="module")
def written(trackers_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `process` with all trackers."""
    folder = tmp_path_factory.mktemp("tracked")
    alone(
        folder,
        *(trackers_python, "-m", "envserver", "process", "--env", "math", "--model", "sim"),
        *("--env.total_steps", 12, "--out", "math.jsonl", "--openai.api_key", SECRET),
        *("--track", "jsonl,wandb,trackio,mlflow,tensorboard", "--tracking.folder", "runs"),
        *("--tracking.name", "first", "--tracking.seconds", 0.2),
        *("--tracking.rollouts_minutes", 0, "--tracking.close_seconds", 600),
    )
    return folder


def test_each_tracker_has_the_settings_the_scalars_and_the_table(
    trackers_python: Path, written: Path
) -> None:
    lines = [json.loads(line) for line in (written / "runs/first.jsonl").read_text().splitlines()]
    scalars = [[line["step"], line["reward"]] for line in lines if "reward" in line]
    rows = [row for line in lines for row in line.get("rollouts", ())]
    assert scalars[-1][0] == 12
    assert [*rows[0]] == [*TRL, *OURS, "turns", "link"]
    assert len(rows) >= 4  # of the last four groups at least; how often was written is chance
    shown = alone(
        written, trackers_python, SUPPORT / "trackers_read_back.py", "runs", "envserver", "first"
    )
    found: dict[str, Any] = json.loads(shown.splitlines()[-1])
    assert [*found] == ["wandb", "trackio", "mlflow", "tensorboard"]
    for name, one in found.items():
        assert one["scalars"] == [[step, pytest.approx(value)] for step, value in scalars], name
        assert len(one["rows"]) == len(rows), name
    for name in ("wandb", "trackio", "mlflow"):
        assert found[name]["config"]["environment"] == "math"
        assert found[name]["config"]["openai"]["api_key"] == "**********"
        texts = [[row[column] for column in TRL[:3]] for row in found[name]["rows"]]
        assert texts == [[row[column] for column in TRL[:3]] for row in rows], name
    assert "| environment | math |" in found["tensorboard"]["config"]


def test_no_secret_is_in_any_file(written: Path) -> None:
    files = [one for one in written.rglob("*") if one.is_file()]
    assert len(files) > 10
    assert [one for one in files if SECRET.encode() in one.read_bytes()] == []
