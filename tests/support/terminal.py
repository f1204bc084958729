"""A command at a terminal of its own, as a person sees it."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from .commands import environment_variables
from .waiting import PATIENCE


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, line: str, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "envserver", *line.split()], cwd=folder,
            env=environment_variables() | {"TERM": "dumb", "COLUMNS": "200"},
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> str:
        """Reads until `text` is shown; returns what was shown since the last call."""
        ends = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < ends, self.seen
            if select.select([self._ours], [], [], 1.0)[0]:
                self.seen += os.read(self._ours, 65536).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, *lines: str) -> None:
        for line in lines:
            os.write(self._ours, f"{line}\n".encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)
