"""verl and SkyRL with a server of ours and a real vLLM for CPU, as processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .commands import Running, running
from .foreign_trainers import SUPPORT, alone
from .vllm_server import VllmServer, running_vllm

ROOT = SUPPORT.parent.parent
_TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Loop:
    """An engine, and a server that does not know it yet."""

    engine: VllmServer
    server: str
    folder: Path


@contextlib.contextmanager
def loop(vllm_python: Path, folder: Path, *words: object) -> Iterator[Loop]:
    """A vLLM that takes weights, and a server that was started without an engine."""
    processed = ("--logprobs-mode", "processed_logprobs")
    with running_vllm(vllm_python, folder, learning=True, more=processed) as engine:
        serve = ("serve", "--openai.base_url", "none", "--openai.model_name", engine.model)
        serve += ("--port", 0, "--store", "groups.db", "--rollouts.max_queued_groups", 0)
        serve += ("--workers.processes", 1, *words)
        with running(*serve, folder=folder) as server:
            url = server.wait_for(r"Trainers: (http://\S+)")[1]
            yield Loop(engine, url, folder)


@contextlib.contextmanager
def trains(python: Path, made: Loop, *command: object, **environ: str) -> Iterator[Running]:
    """A trainer of others, which starts Ray with one GPU that nobody looks for."""
    quiet = {
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ADDRESS": "local",  # not the cluster of a test beside this one
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it kills when others fill the memory
        "GLOO_SOCKET_IFNAME": "lo",
        "ENGINE_URL": made.engine.root_url,
        "SERVER_URL": made.server,  # support/commands.py passes on no ENVSERVER_...
        "WEIGHTS_FOLDER": str(made.folder / "weights"),
    }
    before = dict(os.environ)
    os.environ.update({**alone(ROOT / "clients", ROOT / "tools", _TESTS), **quiet, **environ})
    try:
        with running(*command, folder=made.folder, program=python) as process:
            yield process
    finally:
        os.environ.clear()
        os.environ.update(before)
