"""Runs inside a container: the in-sandbox server, over standard input and output.

The host sends its modules first (see `docker`): the image needs only Python. The
engine has made the backends; the server is process 1, so it cannot be killed from inside, and its
end is the end of all.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path
from typing import cast

from . import inside, linux, seccomp, system
from .accounts import Accounts
from .backend import NamespaceBackend, ignore_signals_from_inside
from .cgroups import CgroupAccounts
from .program import warm_up
from .wire import CONTAINER_ENDED, CONTAINER_READY

_WRITABLE = ("/work", "/tmp", "/dev/shm")


class ContainerBackend(NamespaceBackend):
    """A backend whose namespaces, mounts and bounds are the engine's."""

    def __init__(self) -> None:
        if os.getpid() != 1:  # `kill` reaches whatever this process may kill
            raise RuntimeError("a container's server must be its process 1")
        ignore_signals_from_inside()
        self._filter = seccomp.program(inet=True)
        self.variables = system.variables()

    def furnish(self, disk_bytes: int, inodes: int) -> None:
        """The engine did."""

    def enclose(self, processes: int) -> None:
        Path("/proc/self/oom_score_adj").write_text("1000")  # programs go before their server
        linux.drop_capabilities()
        linux.install_filter(self._filter)

    def accounts(self) -> Accounts:
        return CgroupAccounts()

    def used(self) -> tuple[int, int]:
        taken = inodes = 0
        for place in _WRITABLE:
            state = os.statvfs(place)
            taken += (state.f_blocks - state.f_bfree) * state.f_frsize
            inodes += state.f_files - state.f_ffree
        return taken, inodes - len(_WRITABLE)


class _Pipes:
    """Standard input and output as the one channel that the server talks over."""

    def fileno(self) -> int:
        return 0

    def recv(self, size: int) -> bytes:
        return os.read(0, size)

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]

    def close(self) -> None:
        self.sendall(CONTAINER_ENDED)


def main(preload: list[str]) -> None:
    """The whole life of a container's server."""
    sys.stdout = sys.stderr  # what a module prints must not come between frames
    for name in preload:
        importlib.import_module(name)
    warm_up()
    os.write(1, CONTAINER_READY)
    inside.serve(cast(socket.socket, _Pipes()), ContainerBackend)
