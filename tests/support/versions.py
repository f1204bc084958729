"""A stand-in for a trainer: versions of a model, saved for engines and scored by itself."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from envserver_clients.weights import PromptCheck

from .learning import ROOT, variables

PROMPT = list(range(300, 340))
ANSWER = list(range(400, 432))
ROUNDING = 1e-4
"""How far float32 sums in another order may be apart; versions differ by more than 0.1."""


class LineProcess:
    """A program that answers a line of JSON with one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, **asked: Any) -> Any:
        self.begin(**asked)
        return self.end()

    def begin(self, **asked: Any) -> None:
        """Asks without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        """Waits for the answer."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


P = TypeVar("P", bound=LineProcess)


@contextlib.contextmanager
def line_process(kind: type[P], python: Path, script: str, *words: object) -> Iterator[P]:
    """A script beside this file, run by `python`."""
    command = [python, Path(__file__).with_name(script), *map(str, words)]
    environ = variables() | {"PYTHONPATH": str(ROOT / "clients")}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ)
    try:
        yield kind(process)
    finally:
        process.kill()
        process.wait()


class VersionMaker(LineProcess):
    """What the process of `versions_process.py` does for us."""

    def saver(self, version: int) -> Callable[[Path], None]:
        """Writes the weights of `version` into the folder that it is given."""
        return partial(self._save, version)

    def _save(self, version: int, folder: Path) -> None:
        self.ask(save=str(folder), version=version)

    def score(self, version: int, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """The logprob of each token but the first of each row."""
        found: list[list[float]] = self.ask(score=[list(row) for row in rows], version=version)
        return found

    def check(self, version: int, tolerance: float = ROUNDING) -> PromptCheck:
        """What an engine with `version` computes for a fixed text."""
        (scored,) = self.score(version, [PROMPT + ANSWER])
        return PromptCheck(PROMPT, ANSWER, scored[len(PROMPT) - 1 :], tolerance)


def version_maker(
    python: Path, model: Path, kind: Literal["full", "lora"]
) -> contextlib.AbstractContextManager[VersionMaker]:
    """Versions of the model in the folder `model`, made by `python`."""
    return line_process(VersionMaker, python, "versions_process.py", model, kind)
