"""Starts `envserver` commands by fork, in a process that has imported them already.

A command needs a second of CPU for its imports, and the tests start hundreds. Each is a process of
its own all the same, with the arguments, variables, folder and streams that `subprocess` would give
it. Its sandboxes are made by namespaces where they work, although users get bubblewrap's where that
is installed: a start of bubblewrap takes 0.4 s of CPU more, twice in a command. In `make test-all`
most commands start as users start them, see commands.py.

`python warm_commands.py FD` is the process that forks. A request is one message on the socket FD:
JSON, with the descriptors of stdin, stdout, stderr and of a socket for the answers: first the
process id, then, when it has ended, its exit status, each as decimal text.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MAX_MESSAGE = 1 << 18


@dataclass
class WarmProcess:
    """A command that was started by fork; offers what the tests use of subprocess.Popen."""

    args: Sequence[str]
    pid: int
    ended: socket.socket
    returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self.ended], [], [], seconds)[0]:
            self.returncode = int(self.ended.recv(64))
            self.ended.close()
        return self.returncode


def start(
    argv: Sequence[str], folder: Path, variables: dict[str, str], stdout: IO[Any], stderr: IO[Any]
) -> WarmProcess:
    """Starts a command with nothing on its stdin. `argv[0]` is the path of the program."""
    place = str(folder.absolute())  # the process that forks stands in a folder of its own
    request = json.dumps({"argv": list(argv), "folder": place, "variables": variables})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # answers stay apart
    with theirs, Path(os.devnull).open("rb") as stdin:
        streams = [stream.fileno() for stream in (stdin, stdout, stderr, theirs)]
        socket.send_fds(_forking(), [request.encode()], streams)
    return WarmProcess(argv, int(ours.recv(64)), ours)


@functools.cache
def _forking() -> socket.socket:
    """Starts the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(lambda: (ours.close(), process.wait(30)))
    return ours


def _import_commands() -> None:
    for name in ("envserver.cli", "envserver.running", "envserver.export", "envserver.api"):
        for module in pkgutil.iter_modules(importlib.import_module(name).__path__, f"{name}."):
            importlib.import_module(module.name)
    importlib.import_module("envserver_environments.math.env")
    selection = importlib.import_module("envserver.sandbox.service")
    selection.ORDER = ("namespace", *(name for name in selection.ORDER if name != "namespace"))
    gc.collect()
    gc.freeze()


def _serve(requests: socket.socket) -> None:
    """Forks for each request; returns in the child, when it is what the request asks for."""
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.data is None:
                message, fds, _, _ = socket.recv_fds(
                    requests, MAX_MESSAGE, 4, socket.MSG_CMSG_CLOEXEC
                )
                if not message:
                    os._exit(0)  # the tests have ended
                pid = os.fork()
                if not pid:
                    _close_all(waiting)
                    return _become(json.loads(message), fds)
                answers = socket.socket(fileno=fds.pop())
                answers.send(str(pid).encode())
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))
                for fd in fds:
                    os.close(fd)
            else:
                pid, answers = key.data
                waiting.unregister(key.fd)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with answers:
                    answers.send(str(status).encode())


def _close_all(waiting: selectors.BaseSelector) -> None:
    for key in waiting.get_map().values():
        if key.data is None:
            key.fileobj.close()
        else:
            os.close(key.fd)
            key.data[1].close()
    waiting.close()


def _become(request: dict[str, Any], fds: list[int]) -> None:
    for stream, fd in enumerate(fds[:3]):
        os.dup2(fd, stream)
    for fd in fds:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


if __name__ == "__main__":
    _import_commands()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    from envserver.cli import main

    sys.exit(main())
