"""Scorer processes that misbehave; `envserver score`: rows of every form, a full disk, a stop."""

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.cases import cases_of
from support.waiting import PATIENCE, until

from envserver import Result, Score, ScorerError, StoreError, Task
from envserver.cli import main
from envserver.rollouts import scoring
from envserver.rollouts.scoring import ScorerPool
from envserver.running.python_api import spec_of
from envserver.running.run_settings import ScoreSettings
from envserver.running.scoring import MAX_LINE_BYTES, Summary, run_score

CASES = cases_of(__file__)

ENVIRONMENT = CASES["environment"]


of_module = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def moody(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("moody") / "moody.py"
    path.write_text(ENVIRONMENT)
    return str(path)


@pytest.fixture(scope="module")
def hasty(moody: str) -> str:
    """The same, with little time for what hangs: the rest needs some milliseconds."""
    path = Path(moody).with_name("hasty.py")
    path.write_text(ENVIRONMENT.replace("seconds = 600.0", "seconds = 3.0"))
    return str(path)


@pytest.fixture
def hanging(moody: str) -> Path:
    """What is there as soon as a scorer hangs."""
    path = Path(moody).with_name("hanging")
    path.unlink(missing_ok=True)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(moody: str) -> AsyncIterator[ScorerPool]:
    """One process, which is replaced when it has died."""
    async with ScorerPool(moody, {}, 1) as started:
        yield started


TASK = Task("t", {}, {"answer": "right"})


async def rewards_or_errors(pool: ScorerPool, outputs: list[Any]) -> list[Any]:
    """The scores of all, asked for at once; an error in its place."""
    results = [Result(output=output) for output in outputs]
    return await asyncio.gather(
        *(pool.score(TASK, result) for result in results), return_exceptions=True
    )


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


@pytest.mark.thorough
@of_module
async def test_what_the_text_is_not_to_blame_for_is_no_zero(pool: ScorerPool) -> None:
    """A kill from outside, a task that takes too long in any case, a score that is none."""
    burning = Task("t", {}, {"burn": True})
    wrong = ("nan", "two", "text", "metric", "nothing", "judge")
    for task, output in (
        *((TASK, output) for output in ("full memory", *wrong)),
        *((burning, output) for output in ("", "x")),
    ):
        with pytest.raises(ScorerError):
            await pool.score(task, Result(output=output))


async def test_a_rubric_loads_its_libraries_and_an_environments(moody: str, tmp_path: Path) -> None:
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


@of_module
async def test_what_cannot_be_sent_is_an_error_not_a_hang(pool: ScorerPool) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for output in (deep, lambda: 1):
        with pytest.raises(ScorerError, match="cannot be pickled"):
            await pool.score(TASK, Result(output=output))
    assert (await pool.score(TASK, Result(output="right"))).reward == 1.0


@of_module
async def test_a_scorer_that_dies_while_idle_is_replaced(pool: ScorerPool) -> None:
    pid = int((await pool.score(TASK, Result(output="pid"))).metrics["pid"])
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        later = await pool.score(TASK, Result(output="pid"))
        assert later.metrics["pid"] != pid


@of_module
async def test_scorers_that_died_leave_no_descriptor_to_the_collector_or_to_a_late_signal(
    pool: ScorerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "KILL_GRACE_SECONDS", 2)
    errors: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))

    def open_ones() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    await pool.score(TASK, Result(output="right"))
    before = open_ones()
    gc.disable()
    try:
        await rewards_or_errors(pool, ["die"] * 8)
        await pool.score(TASK, Result(output="right"))
        await until(lambda: open_ones() <= before)
        await asyncio.sleep(2.5)  # their last signals are due by then
        assert not errors
    finally:
        gc.enable()
        loop.set_exception_handler(None)


@of_module
async def test_no_score_is_that_of_another_rollout(pool: ScorerPool) -> None:
    """Whatever comes from the process beside its answers: a fork's, garbage, unknown classes."""
    scores = []
    for output in ("fork", "wrong", "talk", "right", "wrong", "unreadable", "right"):
        scores += await rewards_or_errors(pool, [output])
    assert [each if isinstance(each, Exception) else each.reward for each in scores[:2]] == [1, 0]
    assert isinstance(scores[2], ScorerError) and isinstance(scores[5], ScorerError)
    assert [scores[position].reward for position in (3, 4, 6)] == [1.0, 0.0, 1.0]


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize("output", ["right", "hang", "leave, hang"])
async def test_scorers_end_with_their_server(moody: str, output: str) -> None:
    command = [sys.executable, "-c", CASES["killed"], moody, output]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE
    )
    pid = int(done.stdout)
    await until(lambda: not Path(f"/proc/{pid}").exists() and not left_behind(moody))


async def test_what_a_score_starts_ends_with_it_and_its_cpu_seconds_count(
    moody: str, hasty: str
) -> None:
    """Also a process in a session of its own, whose parent has ended, without any variables."""
    async with ScorerPool(hasty, {}, 1) as pool:
        with pytest.raises(ScorerError, match="longer than 3 seconds"):
            await pool.score(TASK, Result(output="leave, hang"))
        assert not left_behind(hasty)
    async with ScorerPool(moody, {}, 2) as pool:
        burnt, *others = await rewards_or_errors(pool, ["leave, burn", "right", "right"])
        assert burnt == Score(reward=0.0, metrics={"scorer_killed": 1.0})
        assert others == [Score(reward=1.0)] * 2
        assert not left_behind(moody)
        assert await pool.score(TASK, Result(output="leave")) == Score(reward=0.0)
        assert left_behind(moody)
    assert not left_behind(moody)


def left_behind(path: str) -> list[str]:
    """The commands that the environment at `path` started and that run."""
    listed = subprocess.run(["ps", "-wweo", "stat=,args="], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.endswith(path) and line[0] != "Z"]


async def score_file(environment: str, source: Path, target: Path, **settings: Any) -> Summary:
    given = {"input": source, "out": target, "processes": 1, **settings}
    return await run_score(spec_of(ScoreSettings, environment, given))


async def score_lines(
    tmp_path: Path, lines: list[bytes | dict[str, Any]], env: str = "math", **config: Any
) -> tuple[Summary, list[dict[str, Any]]]:
    source, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    encoded = [json.dumps(line).encode() if isinstance(line, dict) else line for line in lines]
    source.write_bytes(b"\n".join(encoded))
    summary = await score_file(env, source, target, processes=2, env=config)
    assert [path.name for path in tmp_path.glob(".*.partial")] == []
    return summary, [json.loads(line) for line in target.read_text().splitlines()]


GSM8K = {"question": "q", "answer": "#### 42"}
AQUA = {"question": "q", "options": ["A)1", "B)2"], "correct": "B"}


async def test_rows_of_all_forms_are_scored_in_order_whatever_some_do(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": r"\boxed{42}"}
    finish = {"type": "function", "function": {"name": "finish", "arguments": '{"answer": "42"}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [finish]}
    parts = {"role": "assistant", "content": [{"type": "text", "text": r"\boxed{42}"}]}
    rows: list[tuple[dict[str, Any], float]] = [
        ({"task": GSM8K, "response": r"\boxed{42}"}, 1.0),
        ({"task": GSM8K, "response": r"\boxed{41}"}, 0.0),
        ({"task": GSM8K, "response": ""}, 0.0),
        ({"task": "sample-gsm8k-02", "response": r"\boxed{-11}"}, 1.0),
        ({"task": GSM8K, "messages": [{"role": "user", "content": "q"}, said]}, 1.0),
        ({"task": GSM8K, "messages": [called]}, 1.0),
        ({"task": GSM8K, "messages": [parts]}, 1.0),
        ({"task": GSM8K, "response": r"\boxed{42}", "finish_reason": "length"}, 0.0),
        ({"task": AQUA, "response": "B"}, 1.0),
    ]  # fmt: skip
    seven = {"problem": "p", "solution": r"\boxed{7}"}
    hostile = (r"\boxed{10^{8}!}", r"\boxed{9^{9^{9^{9}}}}")
    rows = [*(({"task": seven, "response": text}, 0.0) for text in hostile), *rows * 5]
    summary, scores = await score_lines(tmp_path, [row for row, _ in rows])
    assert [score["reward"] for score in scores] == [reward for _, reward in rows]
    assert [score["line"] for score in scores] == list(range(1, len(rows) + 1))
    assert set(scores[0]) == {"line", "reward", "components", "metrics", "error", "rewards"}
    assert all(score["error"] is None for score in scores)
    assert summary.rows == summary.scored == 47 and summary.errors == 0
    assert summary.mean_reward == pytest.approx(30 / 47)


BAD_LINES: list[tuple[bytes, str]] = [
    (b"{", "not JSON: Expecting property name enclosed in double quotes at character"),
    (b'{"task": {"a": NaN}, "response": ""}', "not JSON"),
    (b"\xff\xfe{}", "not UTF-8"),
    (b'{"response": ""}', "`task`"),
    (b'{"task": "sample-gsm8k-01"}', "neither"),
    (b'{"task": "sample-gsm8k-01", "messages": [{"role": "user"}]}', "assistant"),
    (b'{"task": "sample-gsm8k-99", "response": ""}', "no task"),
    (b'{"task": {"text": "x"}, "response": ""}', "as its question"),
    (b'{"task": {"question": "q", "answer": "none"}, "response": ""}', "no answer"),
    (b'{"task": {"\\ud800": 1}, "response": ""}', "as its question"),
    (b'{"a":' * 100_000, "deep"),
    (b'{"task": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b', "response": ""}', ""),
    (b'{"task": "' + b"x" * MAX_LINE_BYTES + b'"}', "longer than"),
]


async def test_bad_rows_are_error_rows_and_never_a_stop(tmp_path: Path) -> None:
    good = json.dumps({"task": GSM8K, "response": r"\boxed{42}"}).encode()
    lines: list[bytes | dict[str, Any]] = []
    for line, _ in BAD_LINES:
        lines += [line, good]
    summary, scores = await score_lines(tmp_path, lines)
    assert [score["line"] for score in scores] == list(range(1, len(lines) + 1))
    for score, (line, words) in zip(scores[::2], BAD_LINES, strict=True):
        assert score["reward"] is None and words in score["error"], line[:80]
    assert [score["reward"] for score in scores[1::2]] == [1.0] * len(BAD_LINES)
    assert summary.errors == summary.scored == len(BAD_LINES)
    assert summary.first_error is not None and summary.first_error.startswith("line 1:")


async def test_scorer_failures_are_error_rows(tmp_path: Path, hasty: str) -> None:
    outputs = ["right", "die", "hang", "nan", "unscorable", "right"]
    rows = [{"task": {"answer": "right"}, "response": output} for output in outputs]
    summary, scores = await score_lines(tmp_path, [*rows, b"", b"  "], env=hasty)
    assert [score["reward"] for score in scores] == [1.0, None, None, None, None, 1.0]
    assert [score["error"] is None for score in scores] == [True, False, False, False, True, True]
    assert (summary.scored, summary.errors, summary.unscorable) == (2, 3, 1)


async def test_a_row_whose_scorer_died_is_scored_once_more(tmp_path: Path, moody: str) -> None:
    rows = [{"task": {"answer": "right"}, "response": text} for text in ("die once", "right")]
    summary, scores = await score_lines(tmp_path, list(rows), env=moody)
    assert [score["reward"] for score in scores] == [1.0, 1.0] and summary.errors == 0


@pytest.mark.parametrize(("response", "status"), [("right", 0), ("raise", 1)])
def test_the_command_says_by_its_exit_status_that_rows_have_errors(
    tmp_path: Path, moody: str, response: str, status: int
) -> None:
    source, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    source.write_text(json.dumps({"task": {"answer": "right"}, "response": response}))
    assert main(["score", "--env", moody, "--input", str(source), "--out", str(target)]) == status
    assert json.loads(target.read_text())["reward"] == (None if status else 1.0)


async def test_a_full_disk_is_a_clear_error(tmp_path: Path, moody: str) -> None:
    source, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    source.write_text("{}\n" * 1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            await score_file(moody, source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [source]


async def test_a_pipe_gets_the_scores_and_a_link_keeps_pointing(tmp_path: Path, moody: str) -> None:
    source, pipe, link = tmp_path / "rows.jsonl", tmp_path / "pipe", tmp_path / "link"
    source.write_text("{}\n")
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "scores.jsonl")
    reader = asyncio.create_task(asyncio.to_thread(pipe.read_text))
    await asyncio.gather(*(score_file(moody, source, to) for to in (pipe, link)))
    assert await reader == (tmp_path / "scores.jsonl").read_text() != ""
    assert pipe.is_fifo() and link.is_symlink()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_stopped_command_leaves_nothing_behind(
    tmp_path: Path, moody: str, number: int, status: int
) -> None:
    source = tmp_path / "rows.jsonl"
    row = json.dumps({"task": {}, "response": "hang"})
    source.write_text(f"{row}\n" * 100)
    words = ["score", "--env", moody, "--input", str(source), "--out", str(tmp_path / "out")]
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "envserver", *words,
        stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    await until(lambda: list(tmp_path.glob(".out.*.partial")))
    os.killpg(command.pid, number)
    _, said = await command.communicate()
    assert command.returncode == status, said
    assert b"Stopped" in said and b"Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
