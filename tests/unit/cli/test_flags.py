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


def read(line: str, command: CommandSpec[Settings] = FILES) -> Settings:
    settings = command.read(line.split())
    assert settings is not None
    return settings


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
    for line, expected in {
        "--resume --color": (True, True, False),
        "--no-resume --no-color": (False, False, False),
        "--resume --no_resume --no-cache": (False, None, True),
        "--resume false --color none --no-cache no": (False, None, False),
        "--resume=off --no-no-cache": (False, None, False),
    }.items():
        settings = read(line, command)
        assert (settings.resume, settings.color, settings.no_cache) == expected
    settings = read("--resume -o x", command)  # it takes no flag for its value
    assert (settings.resume, settings.out) == (True, Path("x"))


def test_names_are_short_or_old_and_single_arguments_are_filled_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = read("--port 9100 --host 127.0.0.1").server
    assert (server.port, server.host) == (9100, "127.0.0.1")
    assert read("--output x").out == Path("x")
    assert capsys.readouterr().err == "envserver: --output is now --out.\n"
    pair = PAIR.read(["left", "--resume", "right"])
    assert pair == Pair(a=Path("left"), b=Path("right"), resume=True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("left", "B is needed (The second)."),
        ("left right more", "Unexpected argument after B and its value."),
        ("left right --no-resume=1", "--no-resume takes no value."),
        ("left right --no-a", "--no-a: there is no such setting."),
        ("-x right", "Unexpected argument '-x'."),
    ],
)
def test_mistakes(line: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PAIR.read(line.split())
    assert expected in str(caught.value)


def test_help_shows_the_arguments_and_the_switches(capsys: pytest.CaptureFixture[str]) -> None:
    PAIR.show_help(["--help"])
    told = capsys.readouterr().out
    for part in (
        "Usage: envserver pair A B",
        "  A path [needed]\n      The first.",
        "  --[no-]resume [false]\n      Go on.",
    ):
        assert part in told
