"""PyPI's openenv against us, both ways, in `.venv-openenv` (`make openenv-peer`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import free_port, running, until
from support.openenv import action_of
from support.openenv_server import OPENING, call, played, transcript

from envserver import Environment
from envserver.registry import find

PEER = Path(__file__).parents[1] / "support" / "openenv_peer"
SECONDS = 120


@pytest.fixture(scope="module")
def games(openenv_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of two environments on openenv's own server."""
    port, folder = free_port(), tmp_path_factory.mktemp("games")
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([openenv_python, PEER / "games.py", str(port)], stderr=log) as server,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: healthy(f"{url}/desk"), SECONDS, (folder / "log").read_text)
            yield url
        finally:
            server.terminate()


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


@pytest.mark.parametrize(
    ("game", "opening", "answers", "rewards"),
    [
        # This one has a single session: the second rollout waits for it.
        ("guess", OPENING, [call("act", guess=one) for one in ("x", 4, 7)], 1.1),
        ("desk", "Use the tools.", [call("save", number=1), call("save", number=7)], 1.0),
    ],
)
async def test_its_servers_are_environments(
    games: str, tmp_path: Path, game: str, opening: str, answers: list[Any], rewards: float
) -> None:
    script = transcript(tmp_path / "t.json", opening, *answers)
    result = await played(f"{games}/{game}", script)
    scores = [one.score.reward for one in result.groups[0].trajectories]
    assert scores == pytest.approx([rewards, rewards])


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
