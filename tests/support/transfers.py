"""A stand-in for a trainer that sends weights over gloo; see transfer_process.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


class SendingTrainer:
    """A process with a model, which does what it is asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Returns what was published or restored, or the error."""
        self.begin(**asked)
        return self.end()

    def begin(self, **asked: Any) -> None:
        """Asks without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Waits for the answer."""
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@contextlib.contextmanager
def sending_trainer(python: Path, model: Path, **settings: Any) -> Iterator[SendingTrainer]:
    """A trainer of the model in the folder `model`; `settings` are those of `Transfer`."""
    script = Path(__file__).with_name("transfer_process.py")
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(_ROOT / "clients"),
    }
    process = subprocess.Popen(
        [python, script, model, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        yield SendingTrainer(process)
    finally:
        process.kill()
        process.wait()
