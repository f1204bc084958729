"""`envserver models tiny`: what it needs, and what is made of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.commands import environment_variables, envserver, read_jsonl
from support.waiting import PATIENCE

ARITHMETIC = (
    *("--env", "math", "--env.data_set", "arithmetic", "--env.system_prompt", ""),
    *("--env.mode", "single", "--env.group_size", "2", "--env.total_steps", "2"),
)


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    done = envserver("models", "tiny", tmp_path / "tiny", folder=tmp_path)
    assert done.returncode == 2
    assert "[local]'" in done.stderr
    assert not list(tmp_path.glob("tiny*"))


@pytest.mark.slow
def test_made_in_short_it_is_served_and_answers_through_the_proxy(
    learn_python: Path, tmp_path: Path
) -> None:
    def learner(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [learn_python.with_name("envserver"), *map(str, words)],
            cwd=tmp_path,
            env=environment_variables() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
            check=False,
        )

    making = ("models", "tiny", "tiny", "--steps", 4, "--groups", 4, "--threads", 1)
    made = learner(*making)
    assert made.returncode == 0, made.stderr
    weights = (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert "Use --overwrite to replace it" in learner(*making).stderr
    again = learner(*making, "--overwrite")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == weights

    done = learner("process", *ARITHMETIC, "--model", "tiny", "--engine.backend", "local")
    assert done.returncode == 0, done.stderr
    groups = read_jsonl(tmp_path / "data" / "math.jsonl")
    assert len(groups) == 2
    assert all(any(kept >= 0 for kept in row) for group in groups for row in group["masks"])
    assert all(group["envserver"]["model"] == "tiny" for group in groups)
    assert not list(tmp_path.glob(".tiny-*"))
