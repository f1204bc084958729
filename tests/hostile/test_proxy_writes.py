"""What one rollout may write to the log and a terminal is bounded and harmless."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import time
from pathlib import Path

import pytest
import structlog
from support.commands import ENVSERVER, environment_variables
from support.proxy_house import house
from support.waiting import PATIENCE

from envserver.telemetry.log_budget import BURST_BYTES, BYTES_PER_SECOND


async def test_a_rollout_cannot_fill_the_servers_log() -> None:
    async with house() as home:
        attempt, _ = home.open()
        began = time.monotonic()
        with structlog.testing.capture_logs() as logged:
            for _ in range(200):
                body = {"event": "a line", "facts": {"text": "x" * 60_000}}
                assert (await home.post(attempt.key, "log", body))[0] == 204
                assert (await home.post(attempt.key, "v1/embeddings", {}))[0] == 404
            home.proxy.seal(attempt)
            for _ in range(9):
                assert (await home.post(attempt.key, "v1/messages", {}))[0] == 409
    earned = (time.monotonic() - began) * BYTES_PER_SECOND
    assert len(json.dumps(logged)) < BURST_BYTES + earned
    events = [line["event"] for line in logged]
    (dropped,) = (line["lines"] for line in logged if line["event"] == "log_lines_dropped")
    assert events.count("a line") + dropped == 200
    assert events.count("call_after_seal") == 1
    assert attempt.late_calls == 9


FORGING = r"""
from envserver import Environment, Score, Task

FORGED = "\x1b[2J\x1b]0;owned\x07\u202e\n2026-01-01 00:00:00 [error    ] FORGED reward=1.0"

class Forging(Environment):
    def tasks(self, split):
        yield Task("task " + FORGED, {}, {})

    def task_from_question(self, question):
        return next(iter(self.tasks("train")))

    async def rollout(self, task, run):
        await run.chat([{"role": "user", "content": "hi"}])
        run.log("event " + FORGED, fact="fact" + FORGED, facts=[FORGED])
        print("printed " + FORGED.replace("\n", "\r"), flush=True)
        if run.rollout_id.endswith("1") and run.attempt == 1:
            raise ValueError("raised " + FORGED)
        return "an answer " + FORGED

    def score(self, task, result):
        return Score(reward=0.0)
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_rollout_forges_no_line_on_a_terminal(tmp_path: Path, form: str) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    shown = shown_on_a_terminal(
        tmp_path, "process", "--env", "forging.py", "--model", "sim", "--sim.latency_seconds", "0",
        "--workers.processes", "1", "--env.group_size", "2", "--env.total_steps", "1",
        "--log_format", form, "--env.data_path_to_save_groups", "out.jsonl",
    )  # fmt: skip
    assert_harmless(shown)
    for place in ("event", "fact", "printed", "raised", "task"):
        assert re.search(rf"{place}[ \\]", shown), place


def test_an_answer_is_harmless_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    shown = shown_on_a_terminal(
        tmp_path, "run", "--env", "forging.py", "--model", "sim", "--question", "?"
    )
    assert "an answer" in shown
    assert not re.search(r"\x1b\[2J|\x1b\]|\x07|\u202e", shown)


def assert_harmless(shown: str) -> None:
    assert not re.search(r"\x1b\[2J|\x1b\]|\x07|\u202e", shown)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", shown)]
    assert not [line for line in lines if line.lstrip().startswith("2026-01-01")]
    assert any("FORGED" in line for line in lines)


def shown_on_a_terminal(folder: Path, *words: str) -> str:
    """What the command shows where its output is a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    variables = environment_variables() | {"TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [ENVSERVER, *words], cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    read = bytearray()
    while True:
        try:
            read += os.read(ours, 65536)
        except OSError:  # Linux says so when the last program at the terminal has ended
            break
    os.close(ours)
    assert process.wait(PATIENCE) == 0, read.decode(errors="replace")
    return read.decode(errors="replace")
