"""PyPI's openenv against us, both ways, in `.venv-openenv` (`make openenv-peer`)."""

import contextlib
import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import free_port, running, until
from support.foreign_trainers import alone, printed, random_model
from support.openenv import action_of
from support.openenv_server import OPENING, call, played, transcript
from support.waiting import PATIENCE

from envserver import Environment
from envserver.registry import find

PEER = Path(__file__).parents[1] / "support" / "openenv_peer"


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
            until(lambda: healthy(f"{url}/desk"), (folder / "log").read_text)
            yield url
        finally:
            server.terminate()


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
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
    result = await played(f"{games}/{game}", transcript(tmp_path / "t.json", opening, *answers))
    scores = [one.score.reward for one in result.groups[0].trajectories]
    assert scores == pytest.approx([rewards, rewards])


output = functools.partial(printed, env=alone())


@pytest.fixture(scope="module")
def ours(openenv_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address below which our environments are OpenEnv servers."""
    port, folder = free_port(), tmp_path_factory.mktemp("ours")
    words = ("--model", "sim", "--port", port, "--rollouts.max_queued_groups", 0)
    with running("serve", "--env", "math,kuhn", *words, folder=folder) as server:
        server.wait_for("Trainers: ")
        yield f"http://127.0.0.1:{port}/openenv"


@pytest.fixture
def task() -> tuple[str, Any]:
    """A task of math, and the turns that solve it."""
    environment: Environment = find("math")(find("math").Config())
    task = next(environment.tasks("train"))
    return task.id, environment.demonstration(task)


def test_its_tool_accepts_our_environments(ours: str, openenv_python: Path) -> None:
    program = openenv_python.with_name("openenv")
    for name in ("math", "kuhn"):
        report = output(program, "validate", "--url", f"{ours}/{name}", "--json")
        assert json.loads(report)["passed"], report


def test_its_clients_play_our_own(ours: str, openenv_python: Path, task: tuple[str, Any]) -> None:
    task_id, turns = task
    actions = json.dumps([{"task_id": task_id}, *map(action_of, turns)])
    for *results, state in json.loads(
        output(openenv_python, PEER / "play.py", f"{ours}/math", actions)
    ):
        assert [result["done"] for result in results] == [False] * len(turns) + [True]
        assert results[-1]["reward"] == 1.0
        assert state["step_count"] == len(turns)


def test_its_harness_as_trl_drives_it_plays_our_environments(
    ours: str, openenv_python: Path, task: tuple[str, Any]
) -> None:
    task_id, turns = task
    said = [
        (
            one.get("content") or "",
            [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in one.get("tool_calls") or ()
            ],
        )
        for one in turns
    ]
    words = (json.dumps({"task_id": task_id}), json.dumps(said))
    ended = output(openenv_python, PEER / "harness.py", f"{ours}/math", *words)
    assert json.loads(ended) == {"done": True, "reward": 1.0}


@pytest.mark.slow
def test_trls_own_loop_plays_our_environments(
    ours: str, openenv_python: Path, learn_python: Path, tmp_path: Path
) -> None:
    model = random_model(learn_python, tmp_path / "model")
    packages = next(openenv_python.parent.parent.glob("lib/python3.*/site-packages"))
    words = (packages, f"{ours}/math", model, tmp_path / "out")
    said = output(learn_python, PEER / "trl_loop.py", *words)
    assert said.count("EPISODE True 0.0") == 4
    assert "rewards/Desk/mean" in said
