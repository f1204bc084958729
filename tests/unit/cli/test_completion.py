"""Completion: what each word may become, and that real shells ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.in_process import Run
from support.waiting import PATIENCE

from envserver.cli import COMMANDS
from envserver.cli.completion import FILES, SCRIPTS, candidates


def names(line: str) -> list[str]:
    """What the last word of a line may become; it is empty behind a space."""
    return [value for value, _ in candidates(line.split(" "))]


def test_what_a_word_may_become() -> None:
    exactly = {
        "": list(COMMANDS),
        "re": ["rescore", "replay"],
        "models s": ["start", "sim"],
        "completion ": list(SCRIPTS),
        "nothing ": [],
        "process --resu": ["--resume"],
        "process --no-resu": ["--no-resume"],
        "serve --por": ["--port"],
        "process --log_format ": ["auto", "console", "json"],
        "process --log_format=c": ["--log_format=console"],
        "process --log_format = c": ["console"],
        "export ": [FILES],
    }
    assert {line: names(line) for line in exactly} == exactly
    assert "--openai.base_url" in names("process --op")
    assert "--env.data_set" in names("process --env math --env.da")
    assert "--env.data_set" not in names("process --env.da")
    assert {"math", FILES} <= set(names("process --env "))
    assert names("export --to sf") != []


def test_a_script_is_printed_for_each_shell(run: Run) -> None:
    for shell, script in SCRIPTS.items():
        assert run(f"completion {shell}").out == script
    run("completion tcsh", status=2)


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """A PATH with an `envserver` of this Python."""
    program = tmp_path / "bin" / "envserver"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m envserver "$@"\n')
    program.chmod(0o755)
    for name in ("some.jsonl", "some file.txt"):
        (tmp_path / name).touch()
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb"}


def asked(shell: str, script: str, folder: Path, environment: dict[str, str]) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell} (apt-get install {shell})")
    done = subprocess.run(
        [shell, *(["-f"] if shell == "zsh" else []), "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_completes(tmp_path: Path, shell_environment: dict[str, str]) -> None:
    expected = {
        "pro": ["process"],
        "models st": ["start"],
        "process --log_format = js": ["json"],
        "process --env ma": ["math"],
        "export some": ["some file.txt", "some.jsonl"],
    }
    script = 'eval "$(envserver completion bash)"\n' + "".join(
        f"""
        COMP_WORDS=(envserver {line}); COMP_CWORD={len(line.split())}
        _envserver
        printf '%s\\n' "${{COMPREPLY[@]}}" | sort
        echo
        """
        for line in expected
    )
    told = asked("bash", script, tmp_path, shell_environment)
    assert [part.splitlines() for part in told.split("\n\n")[:-1]] == [*expected.values()]


def test_zsh_completes(tmp_path: Path, shell_environment: dict[str, str]) -> None:
    script = """
        compdef() { : }
        _files() { print FILES }
        _describe() { print -l -- ${(P)2} }
        eval "$(envserver completion zsh)"
        words=(envserver models st); CURRENT=3
        _envserver
        words=(envserver export ''); CURRENT=3
        _envserver
    """
    told = asked("zsh", script, tmp_path, shell_environment).splitlines()
    assert told == ["start:start an engine for a model and keep it running", "FILES"]


def test_fish_completes(tmp_path: Path, shell_environment: dict[str, str]) -> None:
    script = """
        envserver completion fish | source
        complete -C "envserver models st"
        complete -C "envserver export some.j"
    """
    told = asked("fish", script, tmp_path, shell_environment).splitlines()
    assert told == ["start\tstart an engine for a model and keep it running", "some.jsonl"]
