"""Scorer processes that misbehave."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE, until

from envserver import ConfigError, Result, Score, ScorerError, Task
from envserver.rollouts.scoring import ScorerPool

TASK = Task("t", {}, {"answer": "right"})


async def rewards_or_errors(pool: ScorerPool, outputs: list[Any]) -> list[Any]:
    """The scores of all, asked for at once; an error in its place."""
    results = [Result(output=output) for output in outputs]
    return await asyncio.gather(
        *(pool.score(TASK, result) for result in results), return_exceptions=True
    )


async def test_scores_come_back_whatever_the_neighbours_do(hasty: str) -> None:
    outputs = ["right", "hang", "die", "exit", "right", "raise", "async", "wrong", "unscorable"]
    async with ScorerPool(hasty, {"bonus": 0.25}, 2) as pool:
        got = await rewards_or_errors(pool, outputs)
        again = await rewards_or_errors(pool, ["right"] * 4)
    rewards = ["error" if isinstance(score, ScorerError) else score.reward for score in got]
    assert rewards == [1.0, "error", "error", "error", 1.0, "error", 0.75, 0.0, None]
    assert "longer than 3 seconds" in str(got[1])
    assert "died" in str(got[2]) and got[2].detail["exit_code"] == 7
    assert "SystemExit" in str(got[3])
    assert "no idea" in str(got[5]) and "ValueError" in got[5].detail["traceback"]
    assert [score.reward for score in again] == [1.0] * 4


@pytest.mark.thorough
async def test_the_limit_is_cpu_time_and_loading_and_waiting_are_not_in_it(moody: str) -> None:
    """Loading uses five times the limit, and again after the process was killed."""
    async with ScorerPool(moody, {"cpu_seconds_to_load": 1.0}, 1) as pool:
        before, killed, waited, after = await rewards_or_errors(
            pool, ["prepared", "burn", "wait", "prepared"]
        )
    assert killed == Score(reward=0.0, metrics={"scorer_killed": 1.0})
    assert waited.reward == 1.0
    assert before.metrics == after.metrics == {"times": 1.0}


@pytest.mark.parametrize(
    ("output", "hidden"), [("full memory", {}), ("", {"burn": True}), ("x", {"burn": True})]
)
async def test_what_the_text_is_not_to_blame_for_is_no_zero(
    moody: str, output: str, hidden: dict[str, Any]
) -> None:
    """A kill from outside, and a task that takes too long whatever the answer is."""
    async with ScorerPool(moody, {}, 1) as pool:
        with pytest.raises(ScorerError):
            await pool.score(Task("t", {}, hidden), Result(output=output))


async def test_a_rubric_loads_its_own_libraries_and_those_of_the_environment(
    moody: str, tmp_path: Path
) -> None:
    rubric = tmp_path / "rubric.py"
    rubric.write_text(
        "from envserver import Result, Score\n"
        "class Doubting:\n"
        "    def __init__(self, environment):\n"
        "        self.environment, self.ready = environment, 0\n"
        "    def prepare_scoring(self):\n"
        "        self.ready += 1\n"
        "    def score(self, task, result):\n"
        "        own = self.environment.score(task, result)\n"
        "        return Score(reward=0.5, metrics={**own.metrics, 'ready': self.ready})\n"
    )
    async with ScorerPool(moody, {}, 1, rubric=str(rubric)) as pool:
        score = await pool.score(TASK, Result(output="prepared"))
    assert score == Score(reward=0.5, metrics={"times": 1.0, "ready": 1.0})


@pytest.mark.parametrize("output", ["nan", "two", "text", "metric", "nothing", "judge"])
async def test_invalid_scores_are_errors(moody: str, output: str) -> None:
    async with ScorerPool(moody, {}, 1) as pool:
        with pytest.raises(ScorerError):
            await pool.score(TASK, Result(output=output))


async def test_what_cannot_be_sent_is_an_error_not_a_hang(moody: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    async with ScorerPool(moody, {}, 1) as pool:
        for output in (deep, lambda: 1):
            with pytest.raises(ScorerError, match="cannot be pickled"):
                await pool.score(TASK, Result(output=output))
        assert (await pool.score(TASK, Result(output="right"))).reward == 1.0


async def test_a_scorer_that_dies_while_idle_is_replaced(moody: str) -> None:
    async with ScorerPool(moody, {}, 1) as pool:
        pid = int((await pool.score(TASK, Result(output="pid"))).metrics["pid"])
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            later = await pool.score(TASK, Result(output="pid"))
            assert later.metrics["pid"] != pid


async def test_scorers_that_died_leave_no_descriptor_to_the_collector(moody: str) -> None:
    def open_ones() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    async with ScorerPool(moody, {}, 1) as pool:
        await pool.score(TASK, Result(output="right"))
        before = open_ones()
        gc.disable()
        try:
            await rewards_or_errors(pool, ["die"] * 8)
            await pool.score(TASK, Result(output="right"))
            await until(lambda: open_ones() <= before)
        finally:
            gc.enable()


async def test_cancelling_frees_the_scorer_at_once(moody: str, tmp_path: Path) -> None:
    async with ScorerPool(moody, {}, 1) as pool:
        pid = (await pool.score(TASK, Result(output="pid"))).metrics["pid"]
        hanging = asyncio.create_task(pool.score(TASK, Result(output="hang")))
        await until((tmp_path / "hanging").exists)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await pool.score(TASK, Result(output="pid"))).metrics["pid"] != pid


async def test_no_score_is_that_of_another_rollout(moody: str) -> None:
    """Whatever comes from the process beside its answers: a fork's, garbage, unknown classes."""
    async with ScorerPool(moody, {}, 1) as pool:
        scores = []
        for output in ("fork", "wrong", "talk", "right", "wrong", "unreadable", "right"):
            scores += await rewards_or_errors(pool, [output])
    assert [each if isinstance(each, Exception) else each.reward for each in scores[:2]] == [1, 0]
    assert isinstance(scores[2], ScorerError) and isinstance(scores[5], ScorerError)
    assert [scores[position].reward for position in (3, 4, 6)] == [1.0, 0.0, 1.0]


async def test_groups_are_scored_in_the_scorer(moody: str) -> None:
    async with ScorerPool(moody, {}, 1) as pool:
        scores = await pool.score_group(TASK, [Result()] * 4, [Score(reward=1.0)] * 4)
        assert [score.reward for score in scores] == [0.25] * 4
        with pytest.raises(ScorerError):
            await pool.score_group(TASK, [Result()], [Score(reward=None)])


async def test_an_environment_that_cannot_be_loaded_is_said_at_the_start(
    moody: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    for reference, config, words in (
        (str(broken), {}, "ZeroDivisionError"),
        (moody, {"bonnus": 1}, "bonnus"),
        (str(tmp_path / "none.py"), {}, "no file"),
    ):
        with pytest.raises(ConfigError, match=words):
            async with ScorerPool(reference, config, 1):
                pytest.fail("it must not start")


KILLED = """
import asyncio, os, sys
from pathlib import Path
from envserver import Result, Task
from envserver.rollouts.scoring import ScorerPool

async def main(environment, hanging):
    async with ScorerPool(environment, {}, 1) as pool:
        score = await pool.score(Task("t", {}), Result(output="pid"))
        print(int(score.metrics["pid"]), flush=True)
        asked = asyncio.create_task(pool.score(Task("t", {}), Result(output=sys.argv[2])))
        while sys.argv[2] == "hang" and not hanging.exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[1]).with_name("hanging")))
"""


@pytest.mark.parametrize("output", ["right", "hang"])
async def test_scorers_end_with_their_server(moody: str, tmp_path: Path, output: str) -> None:
    script = tmp_path / "server.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), moody, output]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE
    )
    pid = int(done.stdout)
    await until(lambda: not Path(f"/proc/{pid}").exists())
