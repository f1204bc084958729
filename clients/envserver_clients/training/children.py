"""Runs processes that belong together: starts them in order, restarts them when they die.

Invariants: each is ended by its id in reverse order, even if the owner fails or is interrupted, and
by the kernel if the owner is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import httpx
from envserver_records import EnvserverError
from envserver_records.files import replace_file

_PARENT_DIED: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_TICK_SECONDS: Final = 0.2
_SECONDS_TO_END: Final = 20.0

Command = Callable[[], Sequence[str]]
"""Returns the arguments of a command; called for each start."""


class Children:
    """A context manager that ends its processes at exit, the last started one first.

    `folder` gets their logs and `processes.json`, which has their ids.
    """

    def __init__(
        self, folder: Path, *, restarts: int = 5, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._restarts = restarts
        self._variables = {**os.environ, **(environment or {})}
        self._commands: dict[str, tuple[Command, bool]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._died: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running.values()):
            _end(process)

    def start(
        self, name: str, command: Command, *, ready: str = "", ready_seconds: float = 120.0
    ) -> None:
        """Starts a process; its output goes to `NAME.log`, or to ours without `ready`.

        `ready`: address that answers 200 when the process is ready; "": do not wait. Raises
        EnvserverError: it died before, or took longer than `ready_seconds`.
        """
        self._commands[name] = (command, bool(ready))
        self._begin(name)
        until = time.monotonic() + ready_seconds
        while ready and not _answers(ready):
            if self._running[name].poll() is not None or time.monotonic() > until:
                raise EnvserverError(f"The {name} did not start.", hint=self._last_words(name))
            time.sleep(_TICK_SECONDS)

    def wait_for(self, name: str) -> int:
        """Waits until a process ends by itself; returns its exit status. Others that die meanwhile
        are restarted. Raises EnvserverError: a process died too often.
        """
        while True:
            for other, process in list(self._running.items()):
                status = process.poll()
                if status is None:
                    continue
                if other == name and status >= 0:
                    return status
                self._again(other, status)
            time.sleep(_TICK_SECONDS)

    def _again(self, name: str, status: int) -> None:
        self._died[name] = self._died.get(name, 0) + 1
        if self._died[name] > self._restarts:
            raise EnvserverError(
                f"The {name} died {self._died[name]} times (last: {status}).",
                hint=self._last_words(name),
            )
        self._begin(name)

    def _begin(self, name: str) -> None:
        command, has_log = self._commands[name]
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log(name).open("ab")) if has_log else None
            self._running[name] = subprocess.Popen(
                command(),
                stdout=log,
                stderr=log and subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,  # Ctrl-C reaches only us, who end them in order
                preexec_fn=end_with_parent,
            )
        ids = {one: process.pid for one, process in self._running.items()}
        replace_file(self._folder / "processes.json", json.dumps(ids), sync=False)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _last_words(self, name: str) -> str:
        log = self._log(name)
        return log.read_text(errors="replace")[-1500:] if log.exists() else ""


def end_with_parent() -> None:
    """The kernel ends this process when the one that started it has died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False
