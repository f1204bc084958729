"""Completion: what each word may become, and that real shells ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE

from envserver import main
from envserver.cli import COMMANDS
from envserver.cli.completion import FILES, SCRIPTS, candidates


def names(*words: str) -> list[str]:
    return [value for value, _ in candidates(words)]


def test_commands_and_their_subcommands() -> None:
    assert names("") == list(COMMANDS)
    assert names("re") == ["rescore", "replay"]
    assert names("models", "s") == ["start", "sim"]
    assert names("completion", "") == list(SCRIPTS)
    assert names("nothing", "") == []


def test_flags_of_a_command_and_of_its_environment() -> None:
    assert "--openai.base_url" in names("process", "--op")
    assert "--env.data_set" in names("process", "--env", "math", "--env.da")
    assert "--env.data_set" not in names("process", "--env.da")
    assert names("process", "--resu") == ["--resume"]
    assert names("process", "--no-resu") == ["--no-resume"]
    assert names("serve", "--por") == ["--port"]


def test_environments_choices_and_files() -> None:
    assert {"math", FILES} <= set(names("process", "--env", ""))
    assert names("process", "--log_format", "") == ["auto", "console", "json"]
    assert names("process", "--log_format=c") == ["--log_format=console"]
    assert names("process", "--log_format", "=", "c") == ["console"]
    assert names("export", "--to", "sf") != []
    assert names("export", "") == [FILES]


def test_a_script_is_printed_for_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script
    assert main(["completion", "tcsh"]) == 2


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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pro"], ["process"]),
        (["models", "st"], ["start"]),
        (["process", "--log_format", "=", "js"], ["json"]),
        (["process", "--env", "ma"], ["math"]),
        (["export", "some"], ["some file.txt", "some.jsonl"]),
    ],
)
def test_bash_completes(
    words: list[str], expected: list[str], tmp_path: Path, shell_environment: dict[str, str]
) -> None:
    quoted = " ".join(f"'{word}'" for word in ["envserver", *words])
    script = f"""
        eval "$(envserver completion bash)"
        COMP_WORDS=({quoted}); COMP_CWORD={len(words)}
        _envserver
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    assert sorted(asked("bash", script, tmp_path, shell_environment).splitlines()) == expected


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
