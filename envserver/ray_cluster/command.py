"""The actor: holds one envserver command as its child. It runs on a node, and imports no Ray.

What holds: the child ends when the actor's process ends, however that ends. The kernel sends it
SIGTERM when the thread ends that forked it: the main thread of a plain actor, in `__init__`. The
child has a session of its own, so it ends its workers in its own order. What it prints is in the
log that Ray keeps of the actor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LOG = Path("/proc/self/fd/2")
_KEPT_BYTES = 4096
_AT_ONCE_SECONDS = 5.0
_FOR_CHILDREN = ("RAY_AUTH_", "RAY_TLS_", "RAY_USE_TLS", "RAY_TMPDIR")
"""Variables of Ray by which a child may connect to the cluster, too."""


class Command:
    """A running command. Its methods are called by the driver, one at a time.

    Args:
        argv: the words after `envserver`.
        config: the settings, as JSON; they are in memory only.
        variables: added to the environment; for secrets.
    """

    def __init__(self, argv: Sequence[str], config: str, variables: Mapping[str, str]) -> None:
        self._printed_before = _log_size()
        file = os.memfd_create("envserver-settings")
        try:
            os.write(file, config.encode())
            program = [sys.executable, "-m", "envserver.ray_cluster.child", str(os.getpid())]
            self._child = subprocess.Popen(
                [*program, *argv, "--config", f"/proc/self/fd/{file}"],
                env=_environment() | dict(variables),
                stdin=subprocess.DEVNULL,
                pass_fds=[file],
                start_new_session=True,
            )
        finally:
            os.close(file)

    def state(self) -> dict[str, Any]:
        """Returns where the command runs, its exit status (None: it runs) and what it printed
        last, if it has ended."""
        status = self._child.poll()
        return {
            "host": socket.gethostname(),
            "pid": self._child.pid,
            "status": status,
            "said": "" if status is None else _printed_since(self._printed_before),
        }

    def stop(self, seconds: float) -> int:
        """Ends the command: its open work within `seconds`, then at once; returns its status."""
        for patience in (seconds, _AT_ONCE_SECONDS):
            if self._child.poll() is None:
                self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(patience)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        return self._child.wait()


def _environment() -> dict[str, str]:
    """Returns this process's variables, without those that Ray sets for its worker alone."""
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") or name.startswith(_FOR_CHILDREN)
    }
    if found.get("OMP_NUM_THREADS") == "1":
        del found["OMP_NUM_THREADS"]
    return found


def _log_size() -> int:
    with contextlib.suppress(OSError):
        return _LOG.stat().st_size
    return 0


def _printed_since(size: int) -> str:
    """Returns the end of what was printed since the log had `size` bytes; "" if it is no file."""
    with contextlib.suppress(OSError), _LOG.open("rb") as log:
        if log.seekable():
            log.seek(max(size, os.fstat(log.fileno()).st_size - _KEPT_BYTES))
            return log.read().decode(errors="replace").strip()
    return ""
