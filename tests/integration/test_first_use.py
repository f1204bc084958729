"""What a new user meets: commands that can be typed again, mistakes told at once and plainly."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases_of
from support.commands import ENVSERVER, read_jsonl, running, typed
from support.extent import first_of
from support.http_stand_in import standing_in

from envserver import main

CASES = cases_of(__file__)
WHOLE = CASES["whole"]


def written(folder: Path, code: str) -> Path:
    path = folder / "echo of mine.py"
    path.write_text(code)
    return path


def in_a_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    how = {"cwd": folder, "capture_output": True, "text": True, "check": False}
    return subprocess.run(line, shell=True, **how)


@pytest.mark.thorough
def test_the_commands_that_are_suggested_can_be_typed(tmp_path: Path) -> None:
    config = "class Config(Environment.Config):\n        tries: int = 1\n        key: str = ''\n\n"
    written(tmp_path, WHOLE.replace("    def tasks", f"    {config}    def tasks", 1))
    own = "--env.tries 2 --env.key hush --agent.output_kb 32"
    said = typed(f"process --env 'echo of mine.py' {own} --model sim", tmp_path).stderr
    assert "1 group in data/echo.jsonl" in said
    assert "hush" not in said
    shown = said.partition("Try next:\n")[2].splitlines()
    look, real, serve = (line.partition(" # ")[0] for line in shown)
    assert "view data/echo.jsonl" in look
    for command in (real, serve):
        assert "echo of mine.py" in command
        assert "--env.tries 2 --agent.output_kb 32" in command
    for command in (look, real, serve):
        done = in_a_shell(f"{command} --help", tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), command
        assert done.stdout


@pytest.mark.parametrize("mistake", [*CASES["mistakes"], *first_of(*CASES["rarer"])])
def test_an_environment_that_cannot_run_is_told_in_a_line(
    tmp_path: Path, mistake: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, WHOLE.replace(mistake["old"], mistake["new"], 1))
    status = main(["process", "--env", str(path), "--model", "sim", "--out", str(tmp_path / "o")])
    said = capsys.readouterr().err
    assert status == mistake.get("status", 2), said
    assert mistake["said"] in (said.splitlines()[-1] if status else said)
    assert "Traceback" not in said or "service_failed" in said
    assert sum(map(int, re.findall(r"(\d+) failed attempt", said))) <= 8  # of 12


def refuse(path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
    """Refuses every key, and repeats it in a page of a gateway."""
    title = f"No such key: {headers['authorization']}"
    message = f"<html><head><title>{title}</title></head><body><h1>{title}</h1></body></html>"
    return 401, json.dumps({"error": {"message": message}}).encode()


def test_an_engine_that_refuses_us_is_found_out_before_any_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-mine")
    with standing_in(refuse) as url:
        line = f"process --env math --openai.base_url {url}/v1 --openai.model_name m"
        ran = typed(f"{line} --log_level debug", tmp_path, status=1)
    assert "OPENAI_API_KEY is used: --openai.base_url http" in ran.stderr
    assert "(HTTP 401): No such key: Bearer *** Set the key" in ran.stderr
    assert "engine.page" in ran.stderr and "<h1>" not in ran.stderr.splitlines()[-1]
    assert "Set the key: OPENAI_API_KEY, or ENVSERVER_OPENAI__API_KEY" in ran.stderr
    assert "sk-of-mine" not in ran.stderr + ran.stdout
    assert not (tmp_path / "data" / "math.failures.jsonl").exists()


@pytest.mark.parametrize("number", first_of(signal.SIGINT, signal.SIGTERM))
def test_stopped_while_it_starts_it_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = ("serve", "--env", "math", "--model", "sim", "--port", 0)
    with running(*words, folder=tmp_path) as process:
        # The workers' folder, before they are up.
        process.until(lambda: any(temporary.iterdir()))
        process.send(number)
        assert process.end() in (0, 128 + number), process.output()
    assert not any(path.name.startswith("envserver") for path in temporary.iterdir())
    assert "Traceback" not in process.output()


@pytest.mark.thorough
@pytest.mark.parametrize("environment", first_of("code", "math"))
def test_a_long_path_for_temporary_files_does_no_harm(
    environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a socket's path may be; it is the workers', the scorers' and the sandboxes'."""
    temporary = tmp_path / ("job-" + "1" * 100)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    typed(f"process --env {environment} --model sim --env.total_steps 1", tmp_path)
    assert len(read_jsonl(tmp_path / "data" / f"{environment}.jsonl")) == 1


@pytest.mark.parametrize("closed", first_of("<&- >&- 2>&-", "<&-", ">&-", "2>&-"))
def test_closed_streams_do_no_harm(closed: str, tmp_path: Path) -> None:
    line = f"process --env math --model sim --sim.latency_seconds 0 --env.total_steps 1 {closed}"
    done = in_a_shell(f"{ENVSERVER} {line}", tmp_path)
    assert done.returncode == 0, done.stderr
    groups = read_jsonl(tmp_path / "data" / "math.jsonl")
    assert [group["envserver"]["index"] for group in groups] == [0]


def test_serve_tells_what_fails_and_what_it_leaves(tmp_path: Path) -> None:
    broken = WHOLE.replace(
        "return run.chat", "raise ValueError('no such tool')\n        run.chat", 1
    )
    words = ("serve", "--env", written(tmp_path, broken), "--model", "sim", "--port", 0)
    with running(*words, "--rollouts.max_attempts", 1, folder=tmp_path) as process:
        process.wait_for("group_dropped .*latest_failure='ValueError: no such tool .echo of")
        process.send(signal.SIGTERM)
        assert process.end() == 0
    assert process.output().endswith("\n0 groups kept in the store for trainers.\n")


def test_log_lines_go_where_a_progress_bar_puts_stderr() -> None:
    code = """
import io, sys, logging, structlog
from envserver.cli.loop import configure_logs

configure_logs("info")
sys.stderr = bar = io.StringIO()
structlog.get_logger().info("ours")
logging.getLogger("other").warning("theirs")
print(bar.getvalue())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[info     ] ours" in done.stdout
    assert "[warning  ] theirs" in done.stdout
    assert not done.stderr
