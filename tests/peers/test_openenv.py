"""PyPI's openenv against us, both ways, in `.venv-openenv` (`make openenv-peer`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from support.commands import free_port, running
from support.openenv import action_of

from envserver import Environment
from envserver.registry import find

PEER = Path(__file__).parents[1] / "support" / "openenv_peer"
SECONDS = 120


def output(*words: object) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_its_tool_accepts_our_environments_and_its_clients_play_them(
    openenv_python: Path, tmp_path: Path
) -> None:
    port = free_port()
    words = ("--model", "sim", "--port", port, "--rollouts.max_queued_groups", 0)
    environment: Environment = find("math")(find("math").Config())
    task = next(environment.tasks("train"))
    turns: Any = environment.demonstration(task)
    actions = [{"task_id": task.id}, *map(action_of, turns)]
    with running("serve", "--env", "math,kuhn", *words, folder=tmp_path) as server:
        server.wait_for("Trainers: ")
        for name in ("math", "kuhn"):
            place = f"http://127.0.0.1:{port}/openenv/{name}"
            report = output(
                openenv_python.with_name("openenv"), "validate", "--url", place, "--json"
            )
            assert json.loads(report)["passed"], report
        place = f"http://127.0.0.1:{port}/openenv/math"
        played = json.loads(output(openenv_python, PEER / "play.py", place, json.dumps(actions)))
    for *results, state in played:
        assert [result["done"] for result in results] == [False] * len(turns) + [True]
        assert results[-1]["reward"] == 1.0
        assert state["step_count"] == len(turns)
