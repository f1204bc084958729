"""The command line in this process, in the folder of a test: no other process is started for it."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from envserver import main

from .commands import SLOW_MACHINE


@dataclass
class Said:
    """What a command wrote; `in` asks for words on stderr, wherever its lines were broken."""

    out: str
    err: str

    def __contains__(self, words: str) -> bool:
        return " ".join(words.split()) in " ".join(self.err.split())


Run = Callable[..., Said]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `line`, split as a shell does, in the test's folder; it must end with `status`."""
    monkeypatch.chdir(tmp_path)
    for name, value in SLOW_MACHINE.items():
        monkeypatch.setenv(name, value)

    def command(line: str, status: int = 0) -> Said:
        capfd.readouterr()
        ended = main(shlex.split(line))
        said = Said(*capfd.readouterr())
        assert ended == status, said
        return said

    return command
