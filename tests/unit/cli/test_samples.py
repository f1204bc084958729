"""`--verbose`: samples of conversations, short, now and then, safe for a terminal."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import pytest
from envserver_records.records import Group, Score
from msgspec.structs import replace
from support.api import native_group
from support.commands import running

from envserver.cli.console import Console
from envserver.cli.samples import FIRST_GROUPS, SECONDS_BETWEEN, Samples

HOSTILE = "\x1b[2J\x1b]0;title\x07\u202eabc\r\n" + "\n".join(f"line {n}" for n in range(500))


def terminal(width: int = 60) -> tuple[Console, io.StringIO]:
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
    console, written = terminal()
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


@pytest.mark.parametrize(
    ("rewards", "shown"), [([1.0, 1.0, 1.0], 1), ([1.0, 1.0], 2), ([None] * 4, 2), ([0.0], 1)]
)
async def test_of_equal_rollouts_one_is_enough(rewards: list[float | None], shown: int) -> None:
    console, written = terminal()
    await Samples(console)(rated(*rewards))
    assert written.getvalue().count("Reward:") == shown


async def test_groups_that_are_done_at_the_same_time_are_shown_one_after_the_other() -> None:
    console, written = terminal()
    samples = Samples(console)
    groups = [replace(rated(0.0, 1.0, 0.5, turns=3), task_id=f"task-{n}") for n in range(3)]
    await asyncio.gather(*map(samples, groups))
    headings = [line for line in written.getvalue().splitlines() if "task task-" in line]
    assert len(headings) == 6
    tasks = [re.findall("task-[0-9]", line) for line in headings]
    assert tasks == [["task-0"]] * 2 + [["task-1"]] * 2 + [["task-2"]] * 2


async def test_after_the_first_groups_a_sample_comes_now_and_then() -> None:
    console, written = terminal()
    now = [0.0]
    samples = Samples(console, clock=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        await samples(rated(0.0, 1.0))
    shown = written.getvalue().count("Reward: 1")
    assert shown == FIRST_GROUPS + (99 - FIRST_GROUPS + 1) // SECONDS_BETWEEN


@pytest.mark.thorough
def test_serve_shows_samples(tmp_path: Path) -> None:
    words = (
        "serve", "--env", "math", "--env.group_size", 2, "--model", "sim", "--verbose", "--port", 0,
        "--store", "groups.db", "--workers.processes", 1,
    )  # fmt: skip
    with running(*words, folder=tmp_path) as server:
        server.wait_for("[assistant]")
        server.wait_for("Reward: ")
