"""How a command line is split into flags, their values and positional arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from envserver_records.errors import ConfigError

from envserver import ServerConfig
from envserver.cli.command_line import CommandSpec
from envserver.config import Section


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


def read(*words: str, command: CommandSpec[Settings] = FILES) -> Settings:
    settings = command.read(words)
    assert settings is not None
    return settings


@pytest.mark.parametrize(
    "words",
    [
        ["a,1.jsonl", "b.jsonl", "--resume", "--out", "x"],
        ["--resume", "a,1.jsonl", "b.jsonl", "--out=x"],
        ["-o", "x", "a,1.jsonl", "--resume", "true", "b.jsonl"],
        ["--out", "x", "--resume", "--", "a,1.jsonl", "b.jsonl"],
        ["a,1.jsonl", "--resume", "b.jsonl", "--out", "x"],
        ["a,1.jsonl", "b.jsonl", "--resume", "-o", "x"],
        ["--source", '["a,1.jsonl"]', "b.jsonl", "--resume", "--out", "x"],
    ],
)
def test_arguments_stand_anywhere_and_keep_their_commas(words: list[str]) -> None:
    settings = read(*words)
    assert settings.source == ["a,1.jsonl", "b.jsonl"]
    assert (settings.out, settings.resume) == (Path("x"), True)


@pytest.mark.parametrize(
    ("words", "resume", "color", "no_cache"),
    [
        (["--resume", "--color"], True, True, False),
        (["--no-resume", "--no-color"], False, False, False),
        (["--resume", "--no_resume", "--no-cache"], False, None, True),
        (["--resume", "false", "--color", "none", "--no-cache", "no"], False, None, False),
        (["--resume=off", "--no-no-cache"], False, None, False),
    ],
)
@pytest.mark.parametrize("command", [FILES, NO_FILES])
def test_a_switch_is_turned_on_and_off(
    words: list[str],
    resume: bool,
    color: bool | None,
    no_cache: bool,
    command: CommandSpec[Settings],
) -> None:
    settings = read(*words, command=command)
    assert (settings.resume, settings.color, settings.no_cache) == (resume, color, no_cache)


def test_a_switch_takes_no_flag_for_its_value() -> None:
    settings = read("--resume", "-o", "x", command=NO_FILES)
    assert (settings.resume, settings.out) == (True, Path("x"))


def test_short_names_are_the_same_everywhere() -> None:
    settings = read("--port", "9100", "--host", "127.0.0.1")
    assert (settings.server.port, settings.server.host) == (9100, "127.0.0.1")


def test_single_arguments_are_filled_in_order() -> None:
    settings = PAIR.read(["left", "--resume", "right"])
    assert settings is not None
    assert (settings.a, settings.b, settings.resume) == (Path("left"), Path("right"), True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["left"], "B is needed (The second)."),
        (["left", "right", "more"], "Unexpected argument after B and its value."),
        (["left", "right", "--no-resume=1"], "--no-resume takes no value."),
        (["left", "right", "--no-a"], "--no-a: there is no such setting."),
        (["-x", "right"], "Unexpected argument '-x'."),
    ],
)
def test_mistakes(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PAIR.read(words)
    assert expected in str(caught.value)


def test_an_old_name_of_a_flag_says_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("--output", "x").out == Path("x")
    assert capsys.readouterr().err == "envserver: --output is now --out.\n"


def test_help_shows_the_arguments_and_the_switches(capsys: pytest.CaptureFixture[str]) -> None:
    PAIR.show_help(["--help"])
    told = capsys.readouterr().out
    assert "Usage: envserver pair A B" in told
    assert "  A path [needed]\n      The first." in told
    assert "  --[no-]resume [false]\n      Go on." in told
