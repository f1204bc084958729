"""The warm Python that every sandbox is forked from: imports once, then forks on request.

    supervisor --(id, uid; socket)--> zygote --(fork into fresh namespaces)--> in-sandbox server
                <--("forked", id, directory; pidfd)--

The zygote never blocks on another process. It runs inside the outer layer itself (see
`namespaces`), has no variable and no descriptor of the server, and never runs a program's code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from functools import partial
from typing import Any, NamedTuple

from . import inside, linux, namespaces, outer
from .backend import Backend, HostBackend, NamespaceBackend
from .program import warm_up
from .wire import MAX_MESSAGE_BYTES, NAMESPACE_BACKENDS


class Boot(NamedTuple):
    """Arguments of a zygote, passed as JSON.

    Args:
        control_fd: SOCK_SEQPACKET to the supervisor.
        supervisor_pid: the zygote ends when this process does.
        root: an empty directory, for the outer layer or for the sandboxes' directories on the host.
        preload: modules to import before the outer layer is closed.
        private: see `system.hidden_paths`.
        seen: the programs' view of files; see `system.describe`.
    """

    control_fd: int
    supervisor_pid: int
    backend: str
    root: str
    preload: list[str]
    private: list[str]
    seen: dict[str, Any]


def main(boot_json: str) -> None:
    boot = Boot(**json.loads(boot_json), seen={})
    control = socket.socket(fileno=boot.control_fd)
    try:
        linux.die_with(boot.supervisor_pid, signal.SIGKILL)
        boot.seen.update(outer.prepare(boot.backend, boot.private))
        for name in boot.preload:
            importlib.import_module(name)
        run = partial(_obey, boot, control)
        sys.exit(outer.enter(boot.backend, boot.root, boot.seen, run))
    except Exception as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
        if not isinstance(error, OSError):  # else the kernel refused; the message says why
            sys.__excepthook__(type(error), error, error.__traceback__)
        _tell(control, "broken", f"{type(error).__name__}: {error}"[:2000])
        sys.exit(1)


def _tell(control: socket.socket, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def _obey(boot: Boot, control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    sys.path[:] = boot.seen["search_path"]
    os.environ.clear()
    os.environ.update(boot.seen["variables"])
    _be_first_to_die()
    warm_up()
    gc.collect()
    gc.freeze()
    gc.disable()  # until a program runs: a collection would copy what forks share
    _tell(control, "up")
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        except ConnectionError:  # it ended without reading everything
            return
        if not data:
            return
        request_id, uid = json.loads(data)
        channel = socket.socket(fileno=descriptors[0])
        _make(boot, control, channel, request_id, uid)
        channel.close()


def _be_first_to_die() -> None:
    """Makes the kernel kill sandboxes first when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError as error:  # some containers fix it; then the kernel chooses by size alone
        sys.stderr.write(f"oom_score_adj: {error}\n")


def _make(
    boot: Boot, control: socket.socket, channel: socket.socket, request_id: int, uid: int | None
) -> None:
    directory, owner = "", namespaces.owner(uid)
    try:
        if boot.backend in NAMESPACE_BACKENDS:
            pid = namespaces.fork_inner(uid)
        else:
            directory = _host_directory(boot, request_id, uid)
            pid = os.fork()
    except OSError as error:
        _tell(control, "failed", request_id, f"{type(error).__name__}: {error}"[:2000])
        return
    if pid == 0:
        control.close()
        inside.serve(channel, partial(_backend, boot, uid, owner, directory))
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        _tell(control, "failed", request_id, "it ended at once")
        return
    _tell(control, "forked", request_id, directory, descriptors=(pidfd,))
    os.close(pidfd)


def _host_directory(boot: Boot, request_id: int, uid: int | None) -> str:
    directory = f"{boot.root}/sandbox-{request_id}"
    os.mkdir(directory, 0o700)
    if uid is not None:
        os.chown(directory, uid, uid)
    return directory


def _backend(boot: Boot, uid: int | None, owner: tuple[int, int], directory: str) -> Backend:
    if boot.backend in NAMESPACE_BACKENDS:
        namespaces.settle_inner(*owner)
        return NamespaceBackend(bytes.fromhex(boot.seen["filter"]), boot.seen["variables"])
    zygote_pid = os.getppid()
    if uid is not None:
        namespaces.become_user(uid)
    # No namespace kills this process with the zygote, so ask the kernel for a signal.
    linux.die_with(zygote_pid, signal.SIGTERM)
    confined = boot.backend == "landlock"
    return HostBackend(directory, boot.seen, confined=confined, own_user=uid is not None)
