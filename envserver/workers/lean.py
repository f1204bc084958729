"""The lean parent of companions: a Python that has imported little, and forks into sandboxes.

    forkserver --(fork, worker id; pidfd, channel, pipe)--> lean parent --(fork)--> companion
               <--(ended, worker id, CPU seconds, peak)---              --(status)--> worker

Invariants: it reads nothing that a worker sends. Before a worker runs foreign code, its
companion has joined its namespaces and has its user, limits and filter; until then it runs no code
but this module's. It ends with its worker, since it is in that one's pid namespace.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ..sandbox import linux, namespaces
from ..sandbox.backend import NamespaceBackend, enclose
from .companions import READY, STATUS, Companion
from .linux import bound, close_all_but, new_random_numbers

MAX_MESSAGE_BYTES = 65536
_JOINED = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)


class LeanParent:
    """The forkserver's side. Made while the process has one thread and has imported little.

    `sandbox`: the fields of `WorkerSandbox`; `seen`: see `sandbox.system.describe`.
    """

    def __init__(self, sandbox: dict[str, Any], seen: dict[str, Any]) -> None:
        self.function = ""
        """The function that companions run; "" until one is loaded."""
        self._ended: dict[str, tuple[float, float]] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours = os.getpid()
        if os.fork() == 0:
            try:
                linux.die_with(ours, signal.SIGKILL)
                close_all_but({0, 1, 2, theirs.fileno()})
                _Server(theirs, sandbox, seen).run()
            except Exception:  # noqa: BLE001 - the last frame: whatever it is, say it and end
                traceback.print_exc()
            finally:
                os._exit(0)  # what the forkserver does at its end is not this process's to do
        theirs.close()

    def fileno(self) -> int:
        return self._control.fileno()

    def load(self, function: str) -> str:
        """Has it import the module of `function`; returns why it cannot, "" if it could."""
        self._tell("load", function)
        (error,) = self._receive()
        if not error:
            self.function = function
        return str(error)

    def prepare(self) -> tuple[Companion, list[int]]:
        """Makes the worker's side of a companion, before the worker is forked, and the descriptors
        for `fork`."""
        channel, theirs = socket.socketpair()
        reading, writing = os.pipe()
        return Companion(self.function, channel, reading), [theirs.detach(), writing]

    def fork(self, worker_id: str, pid: int, descriptors: list[int], output: int) -> None:
        worker = os.pidfd_open(pid)
        self._tell("fork", worker_id, descriptors=[worker, *descriptors, output])
        os.close(worker)

    def hear(self) -> None:
        """Takes one message. Raises ConnectionError: it is gone."""
        worker_id, cpu_seconds, peak_memory_mb = self._receive()
        self._ended[worker_id] = cpu_seconds, peak_memory_mb

    def used(self, worker_id: str) -> tuple[float, float]:
        """Returns the CPU seconds and the peak of memory, in MB, of a dead worker's companion.

        A worker that is process 1 of its namespace is dead only when its companion has been reaped.
        """
        while worker_id not in self._ended:
            self.hear()
        return self._ended.pop(worker_id)

    def _tell(self, *message: str, descriptors: list[int] | None = None) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], descriptors or [])

    def _receive(self) -> list[Any]:
        data = self._control.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise ConnectionError("the lean parent has ended")
        return list(json.loads(data))


def load(function: str) -> tuple[Callable[[socket.socket], None] | None, str]:
    """Returns what "module:name" names, or None and why it cannot be imported."""
    module, _, name = function.partition(":")
    try:
        return getattr(importlib.import_module(module), name), ""
    except Exception as error:  # noqa: BLE001 - code of others; the forkserver tells
        return None, f"{type(error).__name__}: {error}"


class _Server:
    def __init__(self, control: socket.socket, sandbox: dict[str, Any], seen: dict[str, Any]):
        self._control = control
        self._sandbox = sandbox
        self._seen = seen
        self._function: Callable[[socket.socket], None] | None = None
        self._companions: dict[int, tuple[int, str, int]] = {}
        """By pidfd: pid, worker id, where to tell the status."""
        self._poll = select.poll()

    def run(self) -> None:
        if os.geteuid() == 0:
            os.setgroups([])  # as workers do: inside it is forbidden
        self._poll.register(self._control, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._companions:
                    self._bury(fd)
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 4)
        if not data:
            return False
        command, name = json.loads(data)
        if command == "load":
            self._tell(self._load(name))
        else:
            self._fork(name, *descriptors)
        return True

    def _load(self, function: str) -> str:
        self._function, error = load(function)
        if error:
            return error
        work = NamespaceBackend.work
        os.environ.clear()
        os.environ.update(self._seen["variables"] | {"HOME": work, "TMPDIR": work})
        gc.collect()
        gc.freeze()
        return ""

    def _fork(self, worker_id: str, worker: int, channel: int, status: int, output: int) -> None:
        try:
            linux.join(worker, linux.CLONE_NEWPID)
            pid = os.fork()
        except OSError:  # the worker has ended
            os.close(status)
            self._tell(worker_id, 0.0, 0.0)
        else:
            if pid == 0:
                self._become(worker, socket.socket(fileno=channel), output)
            ended = os.pidfd_open(pid)
            self._companions[ended] = pid, worker_id, status
            self._poll.register(ended, select.POLLIN)
        for descriptor in (worker, channel, output):
            os.close(descriptor)

    def _bury(self, ended: int) -> None:
        pid, worker_id, status_fd = self._companions.pop(ended)
        self._poll.unregister(ended)
        os.close(ended)
        _, status, used = os.wait4(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # its worker has ended, too
            os.write(status_fd, STATUS.pack(status))
        os.close(status_fd)
        self._tell(worker_id, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)

    def _tell(self, *message: str | float) -> None:
        self._control.send(json.dumps(message).encode())

    def _become(self, worker: int, channel: socket.socket, output: int) -> NoReturn:
        try:
            sys.path[:] = self._seen["search_path"]  # the server's may be the worker's to write
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            close_all_but({0, 1, 2, worker, channel.fileno()})
            if channel.recv(1) == READY and self._function is not None:
                self._confine(worker)
                gc.enable()
                channel.send(READY)
                self._function(channel)
        except BaseException:  # noqa: BLE001 - the last frame: whatever it is, say it and end
            traceback.print_exc()
        finally:
            os._exit(1)

    def _confine(self, worker: int) -> None:
        sandbox = self._sandbox
        linux.join(worker, _JOINED)
        os.close(worker)
        namespaces.become_inner()
        os.chdir(NamespaceBackend.work)
        new_random_numbers()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        bound(sandbox["memory_mb"], sandbox["reserved_mb"], sandbox["disk_mb"])
        enclose(bytes.fromhex(self._seen["filter"]), sandbox["processes"])
