"""A local engine as a process, which can be killed and started again at its address."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.commands import free_port

from .waiting import PATIENCE


@dataclass
class Local:
    """An engine of ours that can be killed and started again at its address."""

    python: Path
    model: Path
    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = (
            *("--model", self.model, "--served-model-name", "tiny", "--port", str(self.port)),
            *("--dtype", "float32", "--enable-lora", "--threads", "1"),
        )
        self.process = subprocess.Popen(
            [self.python, "-m", "envserver_local", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(self.url)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)


@contextlib.contextmanager
def local_engine(python: Path, model: Path) -> Iterator[Local]:
    engine = Local(python, model, free_port())
    engine.start()
    try:
        yield engine
    finally:
        engine.kill()
