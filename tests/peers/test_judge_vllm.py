"""The package of `envserver init --kind judge` with a real vLLM as its judge.

Its model is random: what it says is no judgement until it is held to the form of one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl
from support.vllm_server import VllmServer

from envserver.scaffold import create

pytestmark = pytest.mark.vllm

TASKS = 2
MARK = r'\{"reason": "[a-z]{2}", "mark": [0-4]\}'
MARKS = rf'\{{"marks": \{{"faithful": {MARK}, "clear": {MARK}\}}\}}'


def judged(server: VllmServer, folder: Path, *, held: bool) -> subprocess.CompletedProcess[str]:
    """Runs the package's first tasks, rightly answered; a real vLLM judges them."""
    (path,) = (one for one in create("my-env", "judge", folder) if one.name == "env.py")
    if held:
        form = "structured_outputs=" + repr({"regex": MARKS})
        code = path.read_text().replace("criteria=CRITERIA", f"criteria=CRITERIA, {form}")
        path.write_text(code)
    return envserver(
        *("process", "--env", path, "--env.judged", "true", "--env.total_steps", TASKS),
        *("--env.group_size", 2, "--env.ensure_scores_are_not_same", "false"),
        *("--model", "sim", "--sim.solve_probability", 1, "--rollouts.max_attempts", 1),
        *("--judge.base_url", server.base_url, "--judge.max_tokens", 100),
        *("--out", "out.jsonl"),
        folder=folder,
    )


def rollouts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out.jsonl"
    groups = read_jsonl(path) if path.exists() else []
    return [one for group in groups for one in group["envserver"]["rollouts"]]


def test_a_judge_that_answers_garbage_gives_no_reward_at_all(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    ran = judged(vllm_server, tmp_path, held=False)
    assert rollouts(tmp_path) == [], ran.stdout + ran.stderr
    assert ran.returncode == 1 and "judge_error" in ran.stderr
    assert "Unhandled" not in ran.stderr
    failures = read_jsonl(tmp_path / "out.failures.jsonl")
    failed = [one for one in failures if one["event"] == "rollout_failed"]
    assert failed and {(one["kind"], one["blame"]) for one in failed} == {("judge_error", "engine")}
    assert "The judge gave no answer that could be read, 3 times." in failed[0]["message"]


def test_marks_of_a_judge_that_is_held_to_their_form_are_half_of_the_reward(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    ran = judged(vllm_server, tmp_path, held=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = rollouts(tmp_path)
    assert len(found) == TASKS * 2
    for one in found:
        parts = one["components"]
        assert parts["rule"] == 1.0 and {parts["faithful"], parts["clear"]} <= {
            0,
            0.25,
            0.5,
            0.75,
            1,
        }
        assert one["reward"] == 0.5 + 0.25 * (parts["faithful"] + parts["clear"])
