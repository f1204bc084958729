"""`python -m envserver_clients.learn` as a process, and what its files say."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.commands import Running, running, until

ROOT = Path(__file__).parent.parent.parent
_MAKING = (
    "tools/envserver_local/simulated",
    "tools/envserver_local/tiny",
    "environments/envserver_environments/math",
)


def tiny_model(python: Path, tasks: str = "sums") -> Path:
    """The tiny model, made once per state of what makes it, and kept with the Python."""
    sources = sorted(path for folder in _MAKING for path in (ROOT / folder).rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    folder = python.parent.parent / f"tiny-{tasks}-{digest}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests side by side need it at the same moment
        if not (folder / "config.json").exists():
            words = [python, "-m", "envserver", "models", "tiny", folder, "--threads", "1"]
            words += ["--tasks", tasks]
            made = subprocess.run(
                words, capture_output=True, text=True, check=False, env=variables()
            )
            assert made.returncode == 0, made.stderr[-3000:]
    return folder


def variables() -> dict[str, str]:
    """One thread each; nothing is asked for on the network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Learning:
    """A run of `envserver_clients.learn` that writes into `output`."""

    def __init__(self, output: Path, process: Running) -> None:
        self.output = output
        self.process = process

    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl, whole lines."""
        path = self.output / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [line["reward_mean"] for line in self.lines()]

    def held_out(self) -> list[float]:
        """Mean reward of each evaluation of held-out questions, the last one at the end."""
        text = (self.output / "held_out.jsonl").read_text()
        return [json.loads(line)["reward_mean"] for line in text.splitlines()]

    def wait_for_step(self, step: int) -> None:
        """Until so many steps are written down."""
        until(
            lambda: any(line["step"] >= step for line in self.lines()),
            lambda: f"step {step}: {self.process.output()[-3000:]}",
            alive=self.process.process,
        )

    def kill(self, name: str) -> None:
        """kill -9 of the engine, the server or the trainer."""
        os.kill(json.loads((self.output / "processes.json").read_text())[name], signal.SIGKILL)


@contextlib.contextmanager
def learning(python: Path, model: Path, output: Path, *words: object) -> Iterator[Learning]:
    """Starts one; it is ended on the way out, with all that it started."""
    output.mkdir(parents=True)
    given = ["-m", "envserver_clients.learn", "--model", model, "--output", output, *words]
    with running(*given, folder=output, program=python) as process:
        yield Learning(output, process)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
