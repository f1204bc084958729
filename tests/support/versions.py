"""A stand-in for a trainer: versions of a model, saved for engines and scored by itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from envserver_clients.weights import PromptCheck

PROMPT = list(range(300, 340))
ANSWER = list(range(400, 432))
ROUNDING = 1e-4
"""How far float32 sums in another order may be apart; versions differ by more than 0.1."""


class VersionMaker:
    """What the process of `versions_process.py` does for us."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def saver(self, version: int) -> Callable[[Path], None]:
        """Writes the weights of `version` into the folder that it is given."""
        return partial(self._save, version)

    def _save(self, version: int, folder: Path) -> None:
        self._ask({"save": str(folder), "version": version})

    def score(self, version: int, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """The logprob of each token but the first of each row."""
        found: list[list[float]] = self._ask(
            {"score": [list(row) for row in rows], "version": version}
        )
        return found

    def check(self, version: int, tolerance: float = ROUNDING) -> PromptCheck:
        """What an engine with `version` computes for a fixed text."""
        (scored,) = self.score(version, [PROMPT + ANSWER])
        return PromptCheck(PROMPT, ANSWER, scored[len(PROMPT) - 1 :], tolerance)

    def _ask(self, asked: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def version_maker(
    python: Path, model: Path, kind: Literal["full", "lora"]
) -> Iterator[VersionMaker]:
    """Versions of the model in the folder `model`, made by `python`."""
    script = Path(__file__).with_name("versions_process.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [python, script, model, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        yield VersionMaker(process)
    finally:
        process.kill()
        process.wait()
