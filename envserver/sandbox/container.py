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
import time
from pathlib import Path
from typing import cast

from . import inside, linux, seccomp, system
from .backend import NamespaceBackend, ignore_signals_from_inside
from .program import warm_up
from .usage import Accounts
from .wire import CONTAINER_ENDED, CONTAINER_READY

# Engines show a container its own cgroup, read-only, below /sys/fs/cgroup: one folder per
# controller (cgroups version 1), or one folder for all (version 2). Unlike what is sampled, they
# miss nothing: CPU time of children that were not waited for, memory between two looks, threads.

_ROOT = "/sys/fs/cgroup"
_SERVER_PROCESSES = 1


class CgroupAccounts(Accounts):
    """Accounts of a container in whose cgroup only the in-sandbox server and its programs are.

    A file that is missing (old kernels have no `pids.peak`) leaves its number to sampling.
    """

    def __init__(self, root: str = _ROOT) -> None:
        super().__init__()
        self._root = root
        self._all_in_one = Path(root, "cgroup.controllers").exists()
        self.cpu_exact = self._cpu() is not None
        self._memory_of_server = self._number("memory/memory.usage_in_bytes", "memory.current") or 0

    def cpu_seconds(self, living: float = 0.0) -> float:
        used = self._cpu()
        if used is None:
            return super().cpu_seconds(living)
        return max(0.0, used - time.process_time())

    def peak_memory(self) -> int:
        peak = self._number("memory/memory.max_usage_in_bytes", "memory.peak")
        return 0 if peak is None else max(0, peak - self._memory_of_server)

    def peak_tasks(self) -> int:
        return max(0, (self._number("pids/pids.peak", "pids.peak") or 0) - _SERVER_PROCESSES)

    def memory_kills(self) -> int:
        return self._field("oom_kill", "memory/memory.oom_control", "memory.events") or 0

    def _cpu(self) -> float | None:
        if self._all_in_one:
            microseconds = self._field("usage_usec", "", "cpu.stat")
            return None if microseconds is None else microseconds / 1e6
        nanoseconds = self._number("cpuacct/cpuacct.usage", "")
        return None if nanoseconds is None else nanoseconds / 1e9

    def _number(self, version_1: str, version_2: str) -> int | None:
        text = self._text(version_1, version_2).strip()
        return int(text) if text.isdigit() else None

    def _field(self, name: str, version_1: str, version_2: str) -> int | None:
        for line in self._text(version_1, version_2).splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == name:
                return int(words[1])
        return None

    def _text(self, version_1: str, version_2: str) -> str:
        try:
            return Path(self._root, version_2 if self._all_in_one else version_1).read_text()
        except OSError:  # this kernel or engine does not tell
            return ""


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
    sys.stdout = sys.stderr  # what a module prints must not come between frames
    for name in preload:
        importlib.import_module(name)
    warm_up()
    os.write(1, CONTAINER_READY)
    inside.serve(cast(socket.socket, _Pipes()), ContainerBackend)
