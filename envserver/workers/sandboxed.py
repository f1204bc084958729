"""A worker whose whole process is sandboxed, for agents that execute code in it.

    forkserver (in the outer layer) --one clone--> worker, process 1 of its namespaces

When it ends, every process in its sandbox ends. Programs in it cannot end or stop it by a signal,
except for those of faults (SIGSEGV and the like), which keep their meaning. Limits of single
processes cannot bound their total memory, so it is sampled from outside (`Watch`). The only way out
of the worker's private network is one listening socket in it, at the proxy's own port, that is
handed to the server: whatever HTTP client an agent uses reaches the proxy at the address that it
was given, and nothing else.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..sandbox import landlock, linux, namespaces
from ..sandbox.backend import NamespaceBackend, kernel_bytes
from ..sandbox.usage import numbers, sample
from ..sandbox.wire import NAMESPACE_BACKENDS
from .linux import bound
from .messages import WorkerSandbox
from .process import WorkerSpec, worker_main

LOOK_SECONDS = 0.1
"""Seconds between two samples of a worker's memory."""
_MB = 2**20
_HEARD = {
    *(signal.SIGKILL, signal.SIGSTOP),  # cannot be handled
    *(signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCONT, signal.SIGURG),
    signal.SIGWINCH,
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT),  # are faults
}


def fork_worker(spec: WorkerSpec) -> int:
    """Forks a worker, into its sandbox if it has one; only for a process with one thread."""
    sandbox = spec.sandbox
    if sandbox is not None and sandbox.backend in NAMESPACE_BACKENDS:
        owner = namespaces.owner(spec.user)
        pid = namespaces.fork_inner(spec.user)
        if pid == 0:
            _live(spec, lambda: _confine_in_namespaces(spec, sandbox, owner))
        return pid
    pid = os.fork()
    if pid == 0:
        if sandbox is None:
            worker_main(spec)
        _live(spec, lambda: _confine_on_the_host(spec, sandbox))
    return pid


class Watch:
    """Watches the memory of one worker in its own namespaces, with all that it started."""

    def __init__(self, sandbox: WorkerSandbox, pid: int) -> None:
        self._limit = sandbox.memory_mb * _MB
        self._place = f"/proc/{pid}/root/proc"
        """The worker's own /proc, once it is mounted: it lists every process of the sandbox."""
        self._mounted = Path(self._place)
        self._ours = Path("/proc").stat().st_dev

    def trouble(self) -> str:
        """Returns why the worker must end, as text that follows "the worker"; "" if all is well.

        A worker that has ended is not reported; one that cannot be sampled is.
        """
        try:
            if self._mounted.stat().st_dev == self._ours:
                return ""
            used = sample(numbers(self._place), self._limit, self._place).memory_bytes
            used += kernel_bytes(self._place)
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except OSError as error:
            return f"cannot be watched: {error}"
        return f"passed its {self._limit // _MB} MB of memory" if used > self._limit else ""


def _live(spec: WorkerSpec, confine: Callable[[], None]) -> NoReturn:
    try:
        os.dup2(spec.output_fd, 1)
        os.dup2(spec.output_fd, 2)
        confine()
    except BaseException:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    worker_main(spec)


def _confine_on_the_host(spec: WorkerSpec, sandbox: WorkerSandbox) -> None:
    """Confines without namespaces: its own user and directory, Landlock, a filter, limits.

    It may connect only to the proxy's port, at any address.
    """
    if spec.user is not None:
        namespaces.become_user(spec.user)
    bound(sandbox.memory_mb, sandbox.reserved_mb, sandbox.disk_mb)
    linux.drop_capabilities()
    if sandbox.backend == "landlock":
        landlock.restrict(
            [*spec.seen["visible"], *filter(None, [sandbox.shown])],
            [str(spec.directory)],
            listed=spec.seen["search_path"],
            connect_ports=[sandbox.port],
        )
        linux.install_filter(bytes.fromhex(spec.seen["tcp_filter"]))


def _confine_in_namespaces(
    spec: WorkerSpec, sandbox: WorkerSandbox, owner: tuple[int, int]
) -> None:
    """Sets up process 1 of fresh namespaces, then drops every right to change them."""
    namespaces.settle_inner(*owner)
    backend = NamespaceBackend(bytes.fromhex(spec.seen["filter"]), spec.seen["variables"])
    backend.furnish(sandbox.disk_mb * _MB, sandbox.inodes)
    if spec.companion is not None:
        spec.companion.let_in()
    spec.hand_out(_listen(sandbox.port))
    bound(sandbox.memory_mb, sandbox.reserved_mb, sandbox.disk_mb)
    backend.enclose(sandbox.processes)
    for number in NamespaceBackend.reset_signals:
        signal.signal(number, _do_nothing)


def prepare_for_workers(seen: dict[str, Any]) -> None:
    """Gives the parent of workers in namespaces what they inherit.

    Handlers protect process 1 from the signals of its own namespace: the kernel discards those
    without a handler, unless its first thread blocks them at that moment and it has another thread.
    Programs that it executes do not inherit the handlers.
    """
    sys.path[:] = seen["search_path"]
    os.environ.clear()
    os.environ.update(seen["variables"])
    for number in signal.valid_signals() - _HEARD:
        signal.signal(number, _do_nothing)


def _do_nothing(*_: object) -> None:
    return


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener
