"""Commands that start the processes of the sandbox: supervisor, zygote, maker of containers.

In: what the new process must know. Out: an argv. What holds: the process has the server's import
path and nothing of the user's (`python -I`); its arguments travel as JSON.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from . import docker, docker_maker

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envserver.sandbox.{module} import main; main(sys.argv[2])"
)


class SupervisorBoot(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the supervisor, passed as JSON.

    Args:
        control_fd: SOCK_SEQPACKET whose other end only the server holds: it ends with the server.
        directory: private; holds the socket `socket` and the zygotes' directories.
        concurrent: maximum number of live sandboxes.
        warm: maximum ready sandboxes of each zygote.
        backend, private: see `zygote.Boot`.
        engine, rules: what makes containers, and how many, for the backend `docker`.
    """

    control_fd: int
    directory: str
    concurrent: int
    warm: int
    backend: str
    private: list[str]
    engine: docker.Engine | None = None
    rules: docker.PoolRules | None = None


def start_command(module: str, boot: Any) -> list[str]:
    """Returns the argv that runs `main` of a module here, with the server's import path."""
    path = msgspec.json.encode([str(Path(entry).absolute()) for entry in sys.path]).decode()
    code = _START.format(module=module)
    return [sys.executable, "-I", "-c", code, path, msgspec.json.encode(boot).decode()]


def zygote_command(
    boot: SupervisorBoot, control_fd: int, root: str, preload: list[str]
) -> list[str]:
    """Returns the argv of the zygote, or of the maker of containers, that this process starts."""
    ours = os.getpid()
    if boot.engine is not None and boot.rules is not None:
        maker = docker_maker.Boot(
            control_fd=control_fd, supervisor_pid=ours, engine=boot.engine, rules=boot.rules
        )
        return start_command("docker_maker", maker)
    arguments = {
        "control_fd": control_fd,
        "supervisor_pid": ours,
        "backend": boot.backend,
        "root": root,
        "preload": preload,
        "private": boot.private,
    }
    return start_command("zygote", arguments)
