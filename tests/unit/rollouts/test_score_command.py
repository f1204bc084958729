"""`envserver score`: rows of every form, bad rows, a full disk, a stop."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from envserver import NotFoundError, StoreError
from envserver.cli import main
from envserver.running.scoring import MAX_LINE_BYTES, Summary, run_score


async def score_lines(
    tmp_path: Path, lines: list[bytes | dict[str, Any]], env: str = "math", **config: Any
) -> tuple[Summary, list[dict[str, Any]]]:
    source, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    encoded = [json.dumps(line).encode() if isinstance(line, dict) else line for line in lines]
    source.write_bytes(b"\n".join(encoded))
    summary = await run_score(env, config, source, target, processes=2)
    assert [path.name for path in tmp_path.glob(".*.partial")] == []
    return summary, [json.loads(line) for line in target.read_text().splitlines()]


GSM8K = {"question": "q", "answer": "#### 42"}
AQUA = {"question": "q", "options": ["A)1", "B)2"], "correct": "B"}


async def test_rows_of_every_form_are_scored_in_order(tmp_path: Path) -> None:
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
    summary, scores = await score_lines(tmp_path, [row for row, _ in rows] * 5)
    assert [score["reward"] for score in scores] == [reward for _, reward in rows] * 5
    assert [score["line"] for score in scores] == list(range(1, len(rows) * 5 + 1))
    assert set(scores[0]) == {"line", "reward", "components", "metrics", "error", "rewards"}
    assert summary.rows == summary.scored == 45 and summary.errors == 0
    assert summary.mean_reward == pytest.approx(6 / 9)


BAD_LINES: list[tuple[bytes, str]] = [
    (b"{", "not JSON: Expecting property name enclosed in double quotes at character"),
    (b'{"task": {"a": NaN}, "response": ""}', "not JSON"),
    (b"[1]", "not a JSON object"),
    (b"\xff\xfe{}", "not UTF-8"),
    (b'{"response": ""}', "'task'"),
    (b'{"task": 7, "response": ""}', "'task'"),
    (b'{"task": "sample-gsm8k-01"}', "neither"),
    (b'{"task": "sample-gsm8k-01", "response": 7}', "'response'"),
    (b'{"task": "sample-gsm8k-01", "messages": [7]}', "'messages'"),
    (b'{"task": "sample-gsm8k-01", "messages": [{"role": "user"}]}', "assistant"),
    (b'{"task": "sample-gsm8k-99", "response": ""}', "no task"),
    (b'{"task": {"text": "x"}, "response": ""}', "no data set"),
    (b'{"task": {"question": "q", "answer": "42"}, "response": ""}', "no answer"),
    (b'{"task": {"\\ud800": 1}, "response": ""}', "no data set"),
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
    argv = ["score", "--env", moody, "--input", str(source), "--out", str(target)]
    assert main(argv) == status
    assert json.loads(target.read_text())["reward"] == (None if status else 1.0)


async def test_hostile_answers_leave_the_other_rows_alone(tmp_path: Path) -> None:
    hostile = [r"\boxed{10^{8}!}", r"\boxed{9^{9^{9^{9}}}}"]
    task = {"problem": "p", "solution": r"\boxed{7}"}
    rows = [{"task": task, "response": text} for text in [*hostile, *[r"\boxed{7}"] * 20]]
    _, scores = await score_lines(tmp_path, list(rows))
    assert [score["reward"] for score in scores] == [0.0] * 2 + [1.0] * 20
    assert all(score["error"] is None for score in scores)


async def test_missing_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        await run_score("math", {}, tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    source = tmp_path / "rows.jsonl"
    source.write_text("{}\n")
    with pytest.raises(StoreError):
        await run_score("math", {}, source, tmp_path / "no folder" / "out.jsonl")


async def test_a_failed_run_leaves_the_old_output(tmp_path: Path) -> None:
    source, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    source.write_text("{}\n" * 3)
    target.write_text("old")

    def stop(rows: int, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await run_score("math", {}, source, target, processes=1, progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "scores.jsonl"]
    assert target.read_text() == "old"


async def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    source, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    source.write_text("{}\n" * 1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            await run_score("math", {}, source, target, processes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [source]


async def test_a_pipe_gets_the_scores_and_a_link_keeps_pointing(tmp_path: Path) -> None:
    source, pipe, link = tmp_path / "rows.jsonl", tmp_path / "pipe", tmp_path / "link"
    source.write_text("{}\n")
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "scores.jsonl")
    reader = asyncio.create_task(asyncio.to_thread(pipe.read_text))
    await asyncio.gather(*(run_score("math", {}, source, to, processes=1) for to in (pipe, link)))
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
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__", "hanging"} == {
        "moody.py",
        "rows.jsonl",
    }


async def test_progress_counts_rows_and_ends_at_the_whole(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("{}\n" * 5)
    seen: list[tuple[int, float]] = []
    await run_score(
        "math", {}, source, tmp_path / "out.jsonl", processes=1,
        progress=lambda rows, share: seen.append((rows, share)),
    )  # fmt: skip
    assert [rows for rows, _ in seen] == [1, 2, 3, 4, 5] and seen[-1][1] == 1.0
