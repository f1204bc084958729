"""`envserver run` on one task: for a debugger, by hand, and again when a file changes."""

import asyncio
import io
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from envserver_records.records import Group, Score
from msgspec.structs import replace
from support.api import native_group, running_api
from support.cases import cases_of
from support.commands import envserver, running
from support.in_process import Run
from support.terminal import Terminal
from support.waiting import PATIENCE

from envserver.cli import main
from envserver.cli.console import Console
from envserver.cli.conversation import Samples
from envserver.cli.overview import Overview
from envserver.cli.progress import summary_table
from envserver.http.health import Metrics
from envserver.running.metrics import Tally
from envserver.telemetry.history import Name, Row

CASES = cases_of(__file__)

ENVIRONMENT = CASES["environment"]
TASK = "run --env sums.py --task t3 -o t3.json"
SIM = "--model sim --sim.solve_probability 1 --sim.openers false"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    return tmp_path


def document(place: Path) -> Any:
    return json.loads((place / "t3.json").read_text())


@pytest.mark.thorough
def test_breakpoints_work_in_all_of_the_environment(place: Path) -> None:
    typed = "p number\nc\np self.bonus\nc\np task.id\nc\np result.output\nc\n"
    ran = envserver(*f"{TASK} {SIM} --debug --env.stops true".split(), folder=place, input=typed)
    assert ran.returncode == 0, ran.stderr
    seen = ran.stdout.split("(Pdb)")
    assert "sums.py" in seen[0] and "tasks()" in seen[0] and seen[1].startswith(" 3")
    assert "prepare_scoring()" in seen[2] and seen[3].startswith(" 0.0")
    assert "rollout()" in seen[4] and "the agent has t3" in seen[4] and seen[5].startswith(" 't3'")
    assert "score()" in seen[6] and seen[7].startswith(" 'It is 4'")
    assert "Reward: 1" in ran.stderr
    told = document(place)
    assert told["metadata"]["reward"] == 1.0 and told["final_answer"] == "It is 4"


@pytest.mark.thorough
@pytest.mark.parametrize("fails", ["tasks", "prepare_scoring", "rollout", "score"])
def test_the_traceback_is_the_environments(place: Path, fails: str, run: Run) -> None:
    lines = run(f"{TASK} {SIM} --debug --env.fails {fails}", status=1).err.splitlines()
    first = lines.index("Traceback (most recent call last):")
    assert 'sums.py"' in lines[first + 1] and f"in {fails}" in lines[first + 1]
    assert lines[-1] == f"ZeroDivisionError: in {fails}"
    assert not any("/envserver/" in line for line in lines[first:])


def test_what_cannot_be_run_is_said_before_anything_starts(place: Path, run: Run) -> None:
    for words, told in {
        f"{place}/sums.py --task t3 --question '5 + 1?'": "--question cannot be given with --task",
        f"{place}/sums.py": "--question is needed. Or name a task",
        "gaia --task x --debug": "without a sandbox",
    }.items():
        assert told in run(f"run --env {words} {SIM}", status=2)


@pytest.mark.thorough
def test_a_person_plays_the_model_at_a_terminal(place: Path) -> None:
    with Terminal(f"{TASK} --interactive", place) as terminal:
        shown = terminal.until("> ")
        assert "You are the model" in shown and "3 + 1?" in shown and "!note {text}" in shown
        terminal.type('!note {"txt": "carry"}')
        assert "these arguments: 'text' is a required property" in terminal.until("again.")
        terminal.type('!note {"text": "carry"}', "")
        assert "[tool]" in terminal.until("noted")
        terminal.until("> ")
        terminal.type("It must be", "4", "")
        terminal.until("Reward: 1")
        assert terminal.process.wait(PATIENCE) == 0
    (messages,) = [one["messages"] for one in document(place)["metadata"]["sequences"]]
    function = {"name": "note", "arguments": '{"text": "carry"}'}
    assert messages[1]["tool_calls"][0]["function"] == function
    assert messages[-1]["content"] == "It must be\n4"


@pytest.mark.thorough
def test_a_person_who_leaves_ends_the_run(place: Path) -> None:
    ran = envserver(*TASK.split(), "--interactive", folder=place, input="half an ans")
    assert ran.returncode == 1
    assert "The person acting as the model has left." in ran.stderr


@pytest.mark.thorough
def test_a_changed_file_runs_the_task_again(place: Path) -> None:
    with Terminal(f"{TASK} {SIM} --watch --debug", place) as terminal:
        terminal.until("Reward: 1")
        terminal.until("Waiting for a change")
        (place / "sums.py").write_text(ENVIRONMENT.replace("self.bonus + float(", "0.5 * float("))
        terminal.until("sums.py has changed: running again.")
        terminal.until("Reward: 0.5")
        terminal.until("Waiting for a change")
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.process.wait(PATIENCE) == 130


# What a server does, on a terminal: `envserver top`, and the tables of `serve`


def name(sample: str, **labels: str) -> Name:
    return Name.of(f"envserver_{sample}", labels)


MATH = {"environment": "math"}


def row(at: float, delivered: float, rewards: float, lost: float, scored: float) -> Row:
    agent = MATH | {"agent": ""}
    return at, {
        name("policy_version"): 3,
        name("groups_delivered_total", **MATH): delivered,
        name("reward_sum", **agent): rewards,
        name("reward_count", **agent): delivered * 4,
        name("rollouts_total", end="lost", **MATH): lost,
        name("rollouts_total", end="scored", **MATH): scored,
        name("groups", state="queued"): 7,
        name("queue_depth", run="[red]my-run"): 7,
        name("failed_attempts_total", kind="engine_timeout", **MATH): lost,
        name("part_ready", part="disk"): 0,
        name("replica_calls", replica="a"): 2,
        name("replica_breaker", replica="a"): 2,
        name("replica_calls", replica="b"): 0,
        name("replica_standing", replica="b", standing="old"): 1,
        name("replica_version", replica="b"): 2,
    }


def printed(what: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=150).print(what)
    return out.getvalue()


def shown(*rows: Row) -> dict[str, list[str]]:
    lines = printed(Overview(rows).tables()).splitlines()
    return {line.split()[0]: line.split() for line in lines}


def test_rates_and_rewards_are_those_of_the_last_minute() -> None:
    before, begin = row(0, 90, 0, 0, 0), row(100, 100, 200, 2, 400)
    found = shown(before, begin, row(130, 110, 230, 4, 438))
    # ten groups, forty rewards that sum to 30, two of forty rollouts lost, in half a minute
    assert found["math"] == ["math", "0.750", "20.0", "80.0", "5.0%", "0", "0"]
    assert found["policy"][:6] == ["policy", "version", "3", "·", "20.0", "groups/min"]
    assert found["[red]my-run"][-1] == "7"
    assert found["engine_timeout"][1:] == ["4.0", "4"]
    assert found["disk"] == ["disk", "does", "not", "work"]
    assert found["a"][-2:] == ["set", "aside"]
    assert found["b"][-3:] == ["old", "weights", "(v2)"]


def test_a_server_that_began_again_counts_from_zero() -> None:
    found = shown(row(100, 100, 200, 2, 400), row(130, 5, 20, 0, 20))
    assert found["math"][1:4] == ["1.000", "10.0", "40.0"]


def test_names_that_others_gave_move_no_cursor_and_are_not_all_shown() -> None:
    names = ["\x1b]0;title\x07\x9b2J[red]a", *(f"z{index}" for index in range(70))]
    rows = [(1.0, {name("rollouts_running", environment=one): 1.0 for one in names})]
    tables, line = printed(Overview(rows).tables()), Overview(rows).line()
    assert "?]0;title??2J[red]a" in tables and "and 21 more" in tables
    assert "?]0;title??2J[red]a -" in line
    assert not set("\x1b\x07\x9b") & set(tables + line)


async def test_top_shows_a_server_and_says_why_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics()
    metrics.add(AsyncMock(return_value={"rollouts_running": {"math": 3.0}}))
    async with running_api(tmp_path / "s.db", metrics=metrics) as api:
        assert await asyncio.to_thread(main, ["top", api.url, "--once"]) == 0
        found = capsys.readouterr().out
        assert "no policy version yet" in found and "math" in found
    async with running_api(tmp_path / "s.db") as api:
        assert await asyncio.to_thread(main, ["top", api.url, "--once"]) == 2
        assert "has no curves" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["top", api.url, "--once"]) == 2
    assert "No server answers" in capsys.readouterr().err


# Samples of conversations (`--verbose`): short, now and then, safe for a terminal -----------------

HOSTILE = "\x1b[2J\x1b]0;title\x07\u202eabc\r\n" + "\n".join(f"line {n}" for n in range(500))


def written_at(width: int = 60) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, width=width, force_terminal=True, color_system=None), written


def talk(turns: int) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "run", "arguments": '{"code": "' + "x" * 5000 + '"}'}}]
    one: dict[str, Any] = {"role": "assistant", "content": HOSTILE, "tool_calls": calls}
    return [
        {"role": "user", "content": "Do it."},
        *([one, {"role": "tool", "content": "ok"}] * turns),
    ]


def rated(*rewards: float | None, turns: int = 1) -> Group:
    group = native_group("g", len(rewards), messages=talk(turns))
    rollouts = [
        replace(one, score=Score(reward=reward))
        for one, reward in zip(group.trajectories, rewards, strict=True)
    ]
    return replace(group, trajectories=rollouts)


async def test_the_best_and_the_worst_of_a_group_are_shown_short() -> None:
    console, written = written_at()
    await Samples(console)(rated(0.5, 0.0, None, 1.0, turns=100))
    text = written.getvalue()
    assert "g-3, task task-1: best of 3" in text
    assert "g-1, task task-1: worst of 3" in text
    assert "Reward: 1" in text
    assert text.count("Reward:") == 2
    assert "... 193 messages ..." in text
    assert "lines ..." in text
    assert "characters ..." in text.replace("\n", " ")
    lines = text.splitlines()
    assert len(lines) < 300
    assert max(map(len, lines)) <= 60
    assert not set(text) & {"\x1b", "\x07", "\r", "\u202e"}
    assert "\\x1b[2J" in text


@pytest.mark.thorough
def test_serve_shows_samples(tmp_path: Path) -> None:
    words = (
        "serve", "--env", "math", "--env.group_size", 2, "--model", "sim", "--verbose", "--port", 0,
        "--store", "groups.db", "--workers.processes", 1,
    )  # fmt: skip
    with running(*words, folder=tmp_path) as server:
        server.wait_for("[assistant]")
        server.wait_for("Reward: ")


def test_a_long_task_id_takes_a_few_lines() -> None:
    tally = Tally()
    tally.first_groups.append(replace(native_group("g"), task_id="x" * 3000 + "-end"))
    table = printed(summary_table(tally))
    assert "-end" in table and len(table.splitlines()) < 10
