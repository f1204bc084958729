"""The one process per server that makes sandboxes and ends them with their users.

    client --("open", id, preload)--> supervisor --> zygote --(forked)--> supervisor
           <--("opened", id, isolation; socket of the sandbox, pidfd)----

It listens on a unix socket. A client (same user only) owns the sandboxes that it opened, and they
die with its connection. Invariants: at most `concurrent` sandboxes live, further requests
wait in order; the supervisor dies with the server, the zygotes with it, and every sandbox with its
zygote.

It is a separate single-threaded process because the kernel ties "die with your parent" to the
thread that forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..descriptors import raise_open_files
from . import docker, docker_maker, linux, outer
from .wire import MAX_MESSAGE_BYTES, NAMESPACE_BACKENDS

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
        engine: makes containers, for the backend `docker`.
    """

    control_fd: int
    directory: str
    concurrent: int
    warm: int
    backend: str
    private: list[str]
    engine: docker.Engine | None = None


def start_command(module: str, boot: Any) -> list[str]:
    """The argv that runs `main` of a module here, with the server's import path."""
    path = msgspec.json.encode([str(Path(entry).absolute()) for entry in sys.path]).decode()
    code = _START.format(module=module)
    return [sys.executable, "-I", "-c", code, path, msgspec.json.encode(boot).decode()]


def zygote_command(
    boot: SupervisorBoot, control_fd: int, root: str, preload: list[str]
) -> list[str]:
    """The argv of the zygote, or of the maker of containers, that this process starts."""
    ours = os.getpid()
    if boot.engine is not None:
        maker = docker_maker.Boot(control_fd=control_fd, supervisor_pid=ours, engine=boot.engine)
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


FORK_SECONDS = 20.0
"""Time limit for making a sandbox; a zygote's imports get fifteen times as long."""
IMPORT_SECONDS = 300.0
MAX_ZYGOTES = 8
READY = 2
"""Ready sandboxes that each zygote keeps while half of the places are free; twice as many, up to
`SupervisorBoot.warm`, each time that there was none for a request."""
_CALM_SECONDS = 10.0
"""Seconds without such a request after which each sandbox that is used lowers the number by one."""
_END_SECONDS = 3.0
_PAUSE_SECONDS = 0.01


def main(boot_json: str) -> None:
    boot = msgspec.json.decode(boot_json, type=SupervisorBoot)
    control = socket.socket(fileno=boot.control_fd)
    # Act as if the server had closed its end: an exception could interrupt the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: control.shutdown(socket.SHUT_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)  # an earlier end has closed its socket
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # so that all can be waited for at the end
    raise_open_files()  # some for each client and sandbox
    Supervisor(boot, control).run()


def _wait_for_orphans(until: float) -> None:
    """The children of killed zygotes die with their backend or their parent."""
    while time.monotonic() < until:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.002)
        except ChildProcessError:
            return


@dataclass(eq=False)
class _Client:
    socket: socket.socket
    sandboxes: set[_Opened] = field(default_factory=set)


@dataclass(eq=False)
class _Wanted:
    """A sandbox to be made; `client` None: it is to be kept ready."""

    client: _Client | None
    request_id: int
    preload: tuple[str, ...]
    slot: int = -1
    expires: float = 0.0
    channel: socket.socket | None = None


@dataclass(eq=False)
class _Opened:
    """A live sandbox; `client` None: it is ready for the next request."""

    zygote: _Zygote
    client: _Client | None
    channel: socket.socket
    pidfd: int
    slot: int
    directory: str


@dataclass(eq=False)
class _Zygote:
    preload: tuple[str, ...]
    process: subprocess.Popen[bytes]
    control: socket.socket
    expires: float
    up: bool = False
    failure: str = ""
    waiting: dict[int, _Wanted] = field(default_factory=dict)
    living: set[_Opened] = field(default_factory=set)
    ready: list[_Opened] = field(default_factory=list)
    used_at: float = 0.0
    wanted_ready: int = READY
    missed_at: float = 0.0


def _kill_all_of(uid: int) -> None:
    pid = os.fork()
    if pid == 0:
        os.setresuid(uid, uid, uid)
        os.kill(-1, signal.SIGKILL)  # includes this process, on some kernels
        os._exit(0)
    os.waitpid(pid, 0)


class Supervisor:
    def __init__(self, boot: SupervisorBoot, control: socket.socket) -> None:
        self._boot = boot
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._queue: deque[_Wanted] = deque()
        self._zygotes: dict[tuple[str, ...], _Zygote] = {}
        self._free = list(reversed(range(boot.concurrent)))
        self._next_id = 0
        self._sweepers: list[subprocess.Popen[bytes]] = []
        self._living: set[_Opened] = set()
        self._first_uid = outer.first_user("sandbox", boot.concurrent)

    def run(self) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(f"{self._boot.directory}/socket")
        listening.listen(128)
        self._selector.register(listening, selectors.EVENT_READ, partial(self._accept, listening))
        self._selector.register(self._control, selectors.EVENT_READ, sys.exit)
        with contextlib.suppress(ConnectionError):  # the loop hears that it is closed
            self._control.send(b"up")
        try:
            while True:
                waits = any(not zygote.up or zygote.waiting for zygote in self._zygotes.values())
                for key, _ in self._selector.select(1.0 if waits else None):
                    key.data()
                self._expire()
        finally:
            self._end()

    def _end(self) -> None:
        """Ends zygotes and sandboxes and removes their files: the server may be gone."""
        self._queue.clear()
        for opened in self._living:
            self._kill(opened.pidfd)
        for zygote in self._zygotes.values():
            zygote.process.kill()
            zygote.process.wait()
        until = time.monotonic() + _END_SECONDS
        for opened in list(self._living):
            if select.select([opened.pidfd], [], [], max(0.0, until - time.monotonic()))[0]:
                self._ended(opened)
        for sweeper in self._sweepers:
            sweeper.wait()
        _wait_for_orphans(until)
        command = ["rm", "-rf", "--", self._boot.directory]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)

    # Clients.

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # it is gone again, or no descriptor is left: then it waits
            time.sleep(_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("iII", credentials)
        if uid not in (os.geteuid(), 0):
            connection.close()
            return
        client = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, client))

    def _hear(self, client: _Client) -> None:
        try:
            data = client.socket.recv(MAX_MESSAGE_BYTES)
            message = msgspec.msgpack.decode(data, type=tuple[str, int, tuple[str, ...]])
        except (ConnectionError, msgspec.DecodeError, UnicodeDecodeError):
            self._forget(client)
            return
        word, request_id, preload = message
        if self._boot.engine is not None:  # one maker for all: it hears each with its spec
            preload = ()
        if word == "open":
            self._queue.append(_Wanted(client, request_id, preload))
            self._serve_queue()
        elif word == "cancel":
            self._cancel(client, request_id)

    def _cancel(self, client: _Client, request_id: int) -> None:
        for wanted in list(self._queue):
            if wanted.client is client and wanted.request_id == request_id:
                self._queue.remove(wanted)

    def _forget(self, client: _Client) -> None:
        self._selector.unregister(client.socket)
        client.socket.close()
        for opened in client.sandboxes:
            self._kill(opened.pidfd)
        self._queue = deque(wanted for wanted in self._queue if wanted.client is not client)

    def _answer(self, client: _Client, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(client.socket, [msgspec.msgpack.encode(message)], descriptors)
        except OSError:  # gone or unresponsive: its sandboxes die
            with contextlib.suppress(OSError):
                client.socket.shutdown(socket.SHUT_RDWR)  # so that the selector reports it

    # Making sandboxes.

    def _serve_queue(self) -> None:
        while self._queue:
            zygote = self._zygotes.get(self._queue[0].preload)
            if zygote is not None and zygote.ready:
                self._hand_over(zygote.ready.pop(0), self._queue.popleft())
            elif self._free:
                wanted = self._queue.popleft()
                try:
                    zygote = self._zygote(wanted.preload)
                except OSError as error:
                    self._refuse(wanted, f"no zygote could be started: {error}")
                    continue
                if zygote.up:
                    self._want_more(zygote)
                self._make(zygote, wanted)
            else:
                self._give_up_a_ready_one()
                return

    def _make(self, zygote: _Zygote, wanted: _Wanted) -> None:
        wanted.slot = self._free.pop()
        self._next_id += 1
        zygote.waiting[self._next_id] = wanted
        if wanted.client is not None:
            zygote.used_at = time.monotonic()
        if zygote.up:
            self._ask(zygote, self._next_id, wanted)

    def _want_more(self, zygote: _Zygote) -> None:
        """A request found none ready."""
        zygote.wanted_ready = min(2 * zygote.wanted_ready, self._boot.warm)
        zygote.missed_at = time.monotonic()

    def _keep_some_ready(self, zygote: _Zygote) -> None:
        """Making one often takes longer than using it."""
        if time.monotonic() - zygote.missed_at > _CALM_SECONDS:
            zygote.wanted_ready = max(READY, zygote.wanted_ready - 1)
        on_the_way = sum(wanted.client is None for wanted in zygote.waiting.values())
        missing = zygote.wanted_ready - len(zygote.ready) - on_the_way
        while missing > 0 and not self._queue and len(self._free) > self._boot.concurrent // 2:
            self._make(zygote, _Wanted(None, -1, zygote.preload))
            missing -= 1
        if missing < 0 and zygote.ready:
            self._kill(zygote.ready.pop().pidfd)

    def _give_up_a_ready_one(self) -> None:
        """Ends a ready sandbox whose place another preload list needs."""
        for zygote in self._zygotes.values():
            if zygote.ready:
                self._kill(zygote.ready.pop().pidfd)
                return

    def _ask(self, zygote: _Zygote, number: int, wanted: _Wanted) -> None:
        ours, theirs = socket.socketpair()
        wanted.channel = ours
        wanted.expires = time.monotonic() + FORK_SECONDS
        try:
            message = json.dumps((number, self._uid(wanted.slot))).encode()
            socket.send_fds(zygote.control, [message], [theirs.fileno()])
        except OSError as error:
            self._bury(zygote, f"the zygote cannot be reached: {error}")
        finally:
            theirs.close()

    def _zygote(self, preload: tuple[str, ...]) -> _Zygote:
        zygote = self._zygotes.get(preload)
        if zygote is None:
            if len(self._zygotes) >= MAX_ZYGOTES:
                self._retire_one()
            zygote = self._zygotes[preload] = self._start_zygote(preload)
        return zygote

    def _start_zygote(self, preload: tuple[str, ...]) -> _Zygote:
        self._next_id += 1
        root = Path(self._boot.directory, f"zygote-{self._next_id}")
        root.mkdir(mode=0o711)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(
            zygote_command(self._boot, theirs.fileno(), str(root), list(preload)),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd="/",
            env={"LANG": "C.UTF-8"},
            start_new_session=True,
        )
        theirs.close()
        zygote = _Zygote(preload, process, ours, time.monotonic() + IMPORT_SECONDS)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear_zygote, zygote))
        return zygote

    def _retire_one(self) -> None:
        """Makes room for another preload list: ends the least recently used zygote without
        sandboxes, which would die with it. If each has some, there is one more for now."""
        idle = [
            zygote
            for zygote in self._zygotes.values()
            if zygote.up and not zygote.waiting and len(zygote.living) == len(zygote.ready)
        ]
        if idle:
            oldest = min(idle, key=lambda zygote: zygote.used_at)
            self._bury(oldest, "it was not needed")

    def _hear_zygote(self, zygote: _Zygote) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(zygote.control, MAX_MESSAGE_BYTES, 4)
        except ConnectionError:
            data, descriptors = b"", []
        message = json.loads(data) if data else ["gone"]
        match message:
            case ["up"]:
                zygote.up = True
                for number, wanted in list(zygote.waiting.items()):
                    self._ask(zygote, number, wanted)
            case ["forked", int() as number, str() as directory]:
                self._opened(zygote, number, descriptors[0], directory)
            case ["failed", int() as number, str() as reason]:
                self._fail(zygote.waiting.pop(number, None), reason)
            case ["broken", str() as reason]:
                zygote.failure = reason
            case _:
                self._bury(zygote, zygote.failure or "its parent process ended")

    def _opened(self, zygote: _Zygote, number: int, pidfd: int, directory: str) -> None:
        wanted = zygote.waiting.pop(number, None)
        if wanted is None or wanted.channel is None:  # it took too long
            self._kill(pidfd)
            os.close(pidfd)
            return
        opened = _Opened(zygote, None, wanted.channel, pidfd, wanted.slot, directory)
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._ended, opened))
        zygote.living.add(opened)
        self._living.add(opened)
        if wanted.client is None:
            zygote.ready.append(opened)
            self._serve_queue()
        else:
            self._hand_over(opened, wanted)

    def _hand_over(self, opened: _Opened, wanted: _Wanted) -> None:
        client = wanted.client
        assert client is not None
        opened.client = client
        client.sandboxes.add(opened)
        opened.zygote.used_at = time.monotonic()
        if client.socket.fileno() < 0:
            self._kill(opened.pidfd)
        else:
            descriptors = (opened.channel.fileno(), opened.pidfd)
            message = ("opened", wanted.request_id, self._boot.backend)
            self._answer(client, *message, descriptors=descriptors)
        opened.channel.close()
        self._keep_some_ready(opened.zygote)

    def _kill(self, pidfd: int) -> None:
        """Ends a sandbox: SIGKILL if its programs die with its server, else it cleans up first."""
        whole = self._boot.backend in NAMESPACE_BACKENDS
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL if whole else signal.SIGTERM)

    def _ended(self, opened: _Opened) -> None:
        self._selector.unregister(opened.pidfd)
        os.close(opened.pidfd)
        opened.channel.close()
        opened.zygote.living.discard(opened)
        if opened in opened.zygote.ready:
            opened.zygote.ready.remove(opened)
        if opened.client is not None:
            opened.client.sandboxes.discard(opened)
        self._living.discard(opened)
        if opened.directory:
            self._sweep(opened)
        self._release(opened.slot)

    def _sweep(self, opened: _Opened) -> None:
        """Removes what a sandbox without namespaces may leave: its user's processes and files."""
        uid = self._uid(opened.slot)
        if uid is not None:
            _kill_all_of(uid)  # Wait for its end: the next sandbox may have the same user.
        # Not shutil's: it fails on trees of a thousand levels. The exit status is of no use.
        command = ["rm", "-rf", "--", opened.directory]
        self._sweepers = [p for p in self._sweepers if p.poll() is None]
        self._sweepers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def _uid(self, slot: int) -> int | None:
        return None if self._first_uid is None else self._first_uid + slot

    def _release(self, slot: int) -> None:
        self._free.append(slot)
        self._serve_queue()

    def _fail(self, wanted: _Wanted | None, reason: str) -> None:
        if wanted is None:
            return
        if wanted.channel is not None:
            wanted.channel.close()
        self._refuse(wanted, reason)
        self._release(wanted.slot)

    def _refuse(self, wanted: _Wanted, reason: str) -> None:
        if wanted.client is not None:
            self._answer(wanted.client, "failed", wanted.request_id, reason)

    # What goes wrong.

    def _bury(self, zygote: _Zygote, reason: str) -> None:
        """Ends a zygote; the next request starts another."""
        if self._zygotes.get(zygote.preload) is zygote:
            del self._zygotes[zygote.preload]
        if zygote.control.fileno() >= 0:
            self._selector.unregister(zygote.control)
            zygote.control.close()
        zygote.process.kill()
        zygote.process.wait()
        waiting, zygote.waiting = list(zygote.waiting.values()), {}
        for wanted in waiting:
            self._fail(wanted, reason)

    def _expire(self) -> None:
        now = time.monotonic()
        for zygote in list(self._zygotes.values()):
            if not zygote.up and now > zygote.expires:
                self._bury(zygote, f"importing {', '.join(zygote.preload)} took too long")
            for number, wanted in list(zygote.waiting.items()):
                if wanted.expires and now > wanted.expires:
                    del zygote.waiting[number]
                    self._fail(wanted, f"it was not made within {FORK_SECONDS:g} s")
