"""How a command line is split into flags, their values and positional arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from envserver_records.errors import ConfigError
from support.cases import cases_of
from support.waiting import PATIENCE

from envserver import ServerConfig
from envserver.cli import all_commands
from envserver.cli.command_line import CommandSpec
from envserver.cli.completion import FILES as PATHS
from envserver.cli.completion import candidates
from envserver.settings.section import Section

CASES = cases_of(__file__)


class Settings(Section):
    """Settings of a command made up for these tests."""

    source: list[str] = []
    """Files."""
    out: Path | None = None
    """Where to."""
    resume: bool = False
    """Go on."""
    color: bool | None = None
    """Colors; none: those of the terminal."""
    no_cache: bool = False
    """Read everything again."""
    count: int = 1
    """How many."""
    server: ServerConfig = ServerConfig()


class Pair(Section):
    """Two places."""

    a: Path
    """The first."""
    b: Path
    """The second."""
    resume: bool = False
    """Go on."""


FILES = CommandSpec("files", "", Settings, arguments=("source",))
NO_FILES = CommandSpec("alone", "", Settings)
PAIR = CommandSpec("pair", "", Pair, usage="A B", arguments=("a", "b"))


def read(line: str, command: CommandSpec[Settings] = FILES) -> Settings:
    return command.read(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "a,1.jsonl b.jsonl --resume --out x",
        "--resume a,1.jsonl b.jsonl --out=x",
        "-o x a,1.jsonl --resume true b.jsonl",
        "--out x --resume -- a,1.jsonl b.jsonl",
        "a,1.jsonl --resume b.jsonl --out x",
        "a,1.jsonl b.jsonl --resume -o x",
        '--source ["a,1.jsonl"] b.jsonl --resume --out x',
    ],
)
def test_arguments_stand_anywhere_and_keep_their_commas(line: str) -> None:
    settings = read(line)
    assert settings.source == ["a,1.jsonl", "b.jsonl"]
    assert (settings.out, settings.resume) == (Path("x"), True)


@pytest.mark.parametrize("command", [FILES, NO_FILES])
def test_a_switch_is_turned_on_and_off(command: CommandSpec[Settings]) -> None:
    for line, expected in CASES["switches"].items():
        settings = read(line, command)
        assert f"{settings.resume} {settings.color} {settings.no_cache}" == expected
    settings = read("--resume -o x", command)  # it takes no flag for its value
    assert (settings.resume, settings.out) == (True, Path("x"))


def test_names_are_short_or_old_and_arguments_in_order() -> None:
    server = read("--port 9100 --host 127.0.0.1").server
    assert (server.port, server.host) == (9100, "127.0.0.1")
    assert read("--out_dir x").out == Path("x")
    pair = PAIR.read(["left", "--resume", "right"])
    assert pair == Pair(a=Path("left"), b=Path("right"), resume=True)


@pytest.mark.parametrize(("line", "expected"), CASES["mistakes"])
def test_mistakes(line: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PAIR.read(line.split())
    assert expected in str(caught.value)


# Completion: what each word may become, and that real shells ask for it ---------------------------


def names(line: str) -> list[str]:
    """What the last word of a line may become; it is empty behind a space."""
    return [value for value, _ in candidates(line.split(" "))]


def test_what_a_word_may_become() -> None:
    exactly = CASES["exactly"] | {"": list(all_commands())}
    assert {line: names(line) for line in exactly} == exactly
    assert "--openai.base_url" in names("process --op")
    assert "--env.data_set" in names("process --env math --env.da")
    assert "--env.data_set" not in names("process --env.da")
    assert {"math", PATHS} <= set(names("process --env "))
    assert names("export --to sf") != []


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


@pytest.mark.thorough
def test_bash_completes(tmp_path: Path, shell_environment: dict[str, str]) -> None:
    expected = CASES["completed"]
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
        _files() { print PATHS }
        _describe() { print -l -- ${(P)2} }
        eval "$(envserver completion zsh)"
        words=(envserver models st); CURRENT=3
        _envserver
        words=(envserver export ''); CURRENT=3
        _envserver
    """
    told = asked("zsh", script, tmp_path, shell_environment).splitlines()
    assert told == ["start:start an engine for a model and keep it running", "PATHS"]


def test_fish_completes(tmp_path: Path, shell_environment: dict[str, str]) -> None:
    script = """
        envserver completion fish | source
        complete -C "envserver models st"
        complete -C "envserver export some.j"
    """
    told = asked("fish", script, tmp_path, shell_environment).splitlines()
    assert told == ["start\tstart an engine for a model and keep it running", "some.jsonl"]
