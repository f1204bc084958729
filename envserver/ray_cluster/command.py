"""The actor: holds one envserver command as its child. It runs on a node, and imports no Ray.

The child ends when the actor's process ends, however that ends: the kernel sends it SIGTERM when
the thread ends that forked it, the main thread of a plain actor, in `__init__`. The child has a
session of its own, so it ends its workers in its own order.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
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
    `config`: the settings, as JSON, in memory only. `variables`: for secrets."""

    def __init__(self, argv: Sequence[str], config: str, variables: Mapping[str, str]) -> None:
        self._printed_before = _log_size()
        file = os.memfd_create("envserver-settings")
        try:
            os.write(file, config.encode())
            program = [sys.executable, "-m", "envserver.ray_cluster.command", str(os.getpid())]
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
        """`status` None: it runs. `said`: what it printed last, if it has ended."""
        status = self._child.poll()
        return {
            "host": socket.gethostname(),
            "pid": self._child.pid,
            "status": status,
            "said": "" if status is None else _printed_since(self._printed_before),
        }

    def stop(self, seconds: float) -> int:
        """Ends the open work within `seconds`, then at once; returns the status."""
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
    """Without the variables that Ray sets for its worker alone."""
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


# Other nodes reach it at the address of its node, with tokens that only those know who can ask the
# actor. Its runners are actors of its own, and end with it.

RUNNER_TOKEN = "ENVSERVER_RAY__TOKEN"


class ServerCommand(Command):
    def __init__(self, config: str, cluster: str) -> None:
        import ray

        from ..http.access import create_token

        host = str(ray.util.get_node_ip_address())
        self._folder = Path(tempfile.mkdtemp(prefix="envserver-tokens-"))
        tokens = self._folder / "tokens.yaml"
        self._token, _ = create_token(tokens, "trainer", "trainer")
        runner, _ = create_token(tokens, "runners", "environment")
        port = _free_port(host)
        self._url = f"http://{host}:{port}"
        place = ("--server.host", host, "--server.port", str(port))
        super().__init__(
            ("serve", "--ray.address", cluster, *place, "--server.tokens_file", str(tokens)),
            config,
            {RUNNER_TOKEN: runner},
        )

    def access(self) -> tuple[str, str]:
        return self._url, self._token

    def stop(self, seconds: float) -> int:
        try:
            return super().stop(seconds)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":  # PARENT_PID, and the words after `envserver`
    from ..workers.linux import die_with_parent

    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-m", "envserver", *sys.argv[2:]])
