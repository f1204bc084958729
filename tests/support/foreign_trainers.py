"""Programs of others, as processes; trainers among them, before a server and the local engine."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .commands import Running, running
from .waiting import PATIENCE

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]


def alone(*packages: Path) -> dict[str, str]:
    """One thread, no network, our packages and those in these folders."""
    path = os.pathsep.join(map(str, (ROOT, *packages)))
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": path}


def printed(
    *command: object,
    folder: Path | None = None,
    env: dict[str, str] | None = None,
    seconds: float | None = PATIENCE,
) -> str:
    """Runs a program to its end and returns its stdout; the test fails with what it said."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-5000:]
    return done.stdout


def told(*command: object, **how: Any) -> Any:
    """The JSON in the last line that a program prints; `how` as in `printed`."""
    return json.loads(printed(*command, **how).splitlines()[-1])


def random_model(python: Path, folder: Path, *words: str) -> Path:
    """A tiny random model in `folder`, made by a Python that has torch."""
    printed(python, SUPPORT / "tiny_model.py", folder, *words, env=alone())
    return folder


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """This process's variables for what starts in the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def house(
    python: Path, model: Path, folder: Path, *words: object, engine_words: tuple[object, ...] = ()
) -> Iterator[tuple[str, str]]:
    """A local engine and a server before it, with a store `groups.db`; their addresses."""
    command = ("-m", "envserver_local", "--model", model, "--port", 0, "--threads", 1)
    command += engine_words
    with running(*command, folder=folder, program=python) as engine:
        base_url = engine.wait_for(r"http://127\.0\.0\.1:\d+/v1").group()
        serve = ("serve", "--openai.base_url", base_url, "--port", 0, "--store", "groups.db")
        serve += ("--rollouts.max_queued_groups", 0, "--workers.processes", 1, *words)
        with running(*serve, folder=folder) as server:
            yield server.wait_for(r"Trainers: (http://\S+)")[1], base_url.removesuffix("/v1")


@contextlib.contextmanager
def trainer(
    script: str,
    python: Path,
    model: Path,
    folder: Path,
    urls: tuple[str, str],
    *words: object,
    packages: tuple[Path, ...] = (),
) -> Iterator[Running]:
    """A script of this folder that trains `model` and writes to `folder / "out"`."""
    command = (SUPPORT / script, "--server", urls[0], "--engine", urls[1])
    command += ("--model", model, "--output", folder / "out", *words)
    with environment(alone(*packages)), running(*command, folder=folder, program=python) as process:
        yield process
