"""Trainers of others, as processes, before a server of ours and the local engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .commands import Running, running

SUPPORT = Path(__file__).parent


def alone(*packages: Path) -> dict[str, str]:
    """One thread, no network, our packages and those in these folders."""
    path = os.pathsep.join(map(str, (SUPPORT.parent.parent, *packages)))
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": path}


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
            url = server.wait_for(r"Trainers: (http://\S+)")[1]
            yield url, base_url.removesuffix("/v1")


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
    before = dict(os.environ)
    os.environ.update(alone(*packages))
    try:
        with running(*command, folder=folder, program=python) as process:
            yield process
    finally:
        os.environ.clear()
        os.environ.update(before)
