"""The recipes of the documentation, and the environments of verifiers and Atropos that are rebuilt
there in few lines: right behaviour is paid, and a wrong one is not."""

import functools
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from envserver_records.tasks import Json
from support.cases import cases_of
from support.judging import judge_engine

import envserver
from envserver import Environment, KnownResult, Result, Sandboxes, Score, from_rows
from envserver.registry import find

CASES = cases_of(__file__)

DOCS = Path(__file__).parents[3] / "docs"
RECIPES, REBUILT = sorted((DOCS / "recipes").glob("*.py")), DOCS / "rebuilt"
KEY = "key-of-the-bank"
PAGE = "<title>Example</title><p>This domain is for use in documentation examples.</p>"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *ignored: Any) -> None: ...


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Json]:
    """What the recipes need: a key, and a judge that likes what holds the reference."""

    def say(messages: list[Json]) -> str:
        asked = json.loads(messages[-1]["content"])
        mark = 4 * (asked["reference"] in asked["answer"])
        return json.dumps({"marks": {n: {"reason": "", "mark": mark} for n in asked["criteria"]}})

    monkeypatch.setenv("BANK_KEY", KEY)
    with judge_engine(say) as judge:
        yield {"judge": {"base_url": judge.url, "cache": tmp_path / "judge.db"}}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text(PAGE)
    serve = functools.partial(Quiet, directory=tmp_path / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def rewards(names: list[str], solved: float, settings: Json, **env: Any) -> Any:
    """Plays one rollout of each recipe; returns the rewards by recipe, and all groups as JSON."""
    paths = [str(path) for path in RECIPES if path.stem in names]
    result = envserver.process(
        paths if len(paths) > 1 else paths[0],
        model="sim",
        env={"total_steps": len(paths), "group_size": 1, **env},
        sim={"solve_probability": solved, "latency_seconds": 0},
        rollouts={"min_group_size": 1},
        workers={"processes": 1},
        **settings,
    )
    assert (result.failures, result.dropped) == ({}, {})
    assert KEY not in repr(result.groups)  # the key of a tool of the server is in no record
    return {group.env: group.trajectories[0].score.reward for group in result.groups}


MIXED = [path.stem for path in RECIPES if path.stem != "web"]  # which has settings of its own
FLOWS = ["game", "judge", "multi_agent", "sandbox", "server_tools"]
"""Those with services, agents, tools, a judge or sandboxes; each costs half a second of CPU."""
ANSWERS = ["curriculum", "long_context", "server_tools", "sql", "web"]
"""Those whose output is the text of the last message."""


@pytest.mark.thorough
def test_right_behaviour_is_paid(settings: Json) -> None:
    played = rewards(FLOWS, 1.0, settings)
    assert set(played.values()) == {1.0} and len(played) == len(FLOWS)


@pytest.mark.thorough  # ten environments, each with processes of its own
@pytest.mark.parametrize("solved", [pytest.param(1.0, marks=pytest.mark.slow), 0.0])
def test_right_behaviour_is_paid_and_spoiled_is_not(
    settings: Json, site: str, tmp_path: Path, solved: float
) -> None:
    played = rewards(MIXED, solved, settings)
    assert set(played.values()) == {solved} and len(played) == 9
    web = {"site": site, "local": True, "folder": str(tmp_path / "web")}
    assert rewards(["web"], solved, {}, **web) == {"browse": solved}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
async def test_known_results_are_paid_as_they_should_be(path: Path, rooms: Sandboxes) -> None:
    environment: Environment = find(str(path))()
    environment.sandboxes = rooms
    for task, _ in zip(environment.tasks("train"), range(3), strict=False):
        known = list(environment.known_results(task))
        assert any(one.most < 1 for one in known)
        if path.stem in ANSWERS:
            (*_, last) = environment.demonstration(task) or ()
            known.append(KnownResult("right", Result(output=last["content"]), 1.0, 1.0))
        for one in known:
            score = environment.score(task, one.result)
            score = score if isinstance(score, Score) else await score
            paid = fmean(score.rewards.values()) if score.rewards else score.reward
            assert paid is not None and one.least <= paid <= one.most, one.name


# Rebuilt environments.

ROWS: dict[str, tuple[Json, dict[str, float]]] = CASES["rows"]
"""A row as its data set has it, and rewards of answers."""


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_paid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, rewards = ROWS[name]
    kind: Any = find(str(REBUILT / f"{name}.py"))
    monkeypatch.setattr(kind, "source", from_rows([row]).source)
    environment = kind()
    (task,) = environment.tasks("train")
    for output, reward in rewards.items():
        assert environment.score(task, Result(output=output)).reward == reward, output


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    message = {"role": "user", "content": "1 + 2?"}
    row = {"messages": [message], "tools": [tool], "calls": [["add", {"a": 1, "b": 2}]]}
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


@pytest.mark.thorough  # processes
@pytest.mark.parametrize("solved", [1.0, 0.0])
def test_right_plays_are_paid_and_spoiled_ones_are_not(calls: Path, solved: float) -> None:
    for name, env in (("glossary", {}), ("tool_calls", {"rows": str(calls)})):
        (group,) = envserver.process(
            str(REBUILT / f"{name}.py"),
            model="sim",
            env={"total_steps": 1, "group_size": 1, **env},
            sim={"solve_probability": solved, "latency_seconds": 0},
            rollouts={"min_group_size": 1},
        ).groups
        assert group.trajectories[0].score.reward == solved
