"""Makes the sandboxes of the backend `docker`: takes the place of a zygote, for all preload lists.

    supervisor --("fork")--> maker --(fork)--> relay
    relay --(what its spec wants)--> maker --(a container's input and output)--> relay

A relay is a process of this machine, one per sandbox: it reads the spec, asks the maker for a
container, then passes bytes on. The container ends with its relay, and everything with the maker.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from . import linux
from .docker import ContainerKey, Engine, PoolRules, key_of
from .docker_pool import Container, NoContainer, Pool, Wanted
from .wire import CONTAINER_ENDED, MAX_MESSAGE_BYTES, Frames, encode

_CHUNK = 2**18
_LEAVE_SECONDS = 2.0
"""For a container to end when its input has; then it is killed."""
_KILL_SECONDS = 6.0


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a maker, passed as JSON; see `zygote.Boot`."""

    control_fd: int
    supervisor_pid: int
    engine: Engine
    rules: PoolRules


def main(boot_json: str) -> None:
    """Runs a maker until the supervisor ends."""
    boot = msgspec.json.decode(boot_json, type=Boot)
    control = socket.socket(fileno=boot.control_fd)
    linux.die_with(boot.supervisor_pid, signal.SIGKILL)
    control.send(json.dumps(["up"]).encode())
    _Maker(boot, control).run()


class _Maker:
    def __init__(self, boot: Boot, control: socket.socket) -> None:
        self._engine = boot.engine
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._fork)
        self._pool = Pool(boot.engine, boot.rules, self._selector)
        self._wanted: dict[socket.socket, Wanted] = {}
        self._given: dict[socket.socket, Container] = {}

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._pool.seconds_left()):
                key.data()
            self._pool.tend()

    def _fork(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        if not data:
            sys.exit(0)
        request_id, _ = json.loads(data)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        maker_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no process is left: this sandbox cannot be, others can
            for descriptor in (descriptors[0], ours.detach(), theirs.detach()):
                os.close(descriptor)
            self._control.send(json.dumps(["failed", request_id, str(error)]).encode())
            return
        if pid == 0:
            _serve(descriptors[0], theirs.detach(), self._engine, maker_pid)
        os.close(descriptors[0])
        theirs.close()
        pidfd = os.pidfd_open(pid)
        message = json.dumps(["forked", request_id, ""]).encode()
        socket.send_fds(self._control, [message], [pidfd])
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, ours))
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._buried, pid, pidfd))

    def _buried(self, pid: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)

    def _hear(self, relay: socket.socket) -> None:
        """A relay wants a container, wants its container killed, or has ended."""
        try:
            data = relay.recv(MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if data and relay not in self._wanted:
            key = msgspec.json.decode(data, type=ContainerKey)
            wanted = self._wanted[relay] = Wanted(key, partial(self._give, relay))
            self._pool.want(wanted)
        elif data and relay in self._given:
            self._pool.kill(self._given[relay])
        elif not data:
            self._selector.unregister(relay)
            relay.close()
            if relay in self._wanted:
                self._pool.give_up(self._wanted.pop(relay))
            if relay in self._given:
                self._pool.returned(self._given.pop(relay))

    def _give(self, relay: socket.socket, found: Container | NoContainer) -> None:
        if isinstance(found, NoContainer):
            kind = "no_image" if found.image_missing else "unavailable"
            with contextlib.suppress(OSError):
                relay.send(json.dumps([kind, str(found)]).encode())
            return
        self._given[relay] = found
        process = found.running.process
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout, contextlib.suppress(OSError):
            pipes = [process.stdin.fileno(), process.stdout.fileno()]
            socket.send_fds(relay, [b'["container"]'], pipes)


def _serve(channel_fd: int, asking_fd: int, engine: Engine, maker_pid: int) -> NoReturn:
    """Runs a relay; ends the process.

    Failures are written to standard error; the client sees that its sandbox is lost.
    """
    status = 1
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        kept = (0, 1, 2, channel_fd, asking_fd)
        for entry in list(Path("/proc/self/fd").iterdir()):  # others keep other containers alive
            if int(entry.name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(entry.name))
        linux.die_with(maker_pid, signal.SIGTERM)
        _relay(socket.socket(fileno=channel_fd), socket.socket(fileno=asking_fd), engine)
        status = 0
    except (SystemExit, ConnectionError):
        status = 0
    except Exception as error:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        sys.stderr.write(f"a container's relay: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def _relay(channel: socket.socket, asking: socket.socket, engine: Engine) -> None:
    first, spec = _hear_spec(channel)
    try:
        key = key_of(engine, spec)
    except ValueError as error:
        channel.sendall(encode("error", "unavailable", str(error)))
        return
    asking.send(msgspec.json.encode(key))
    _wait_unless_closed(channel, asking)
    answer, descriptors, _, _ = socket.recv_fds(asking, MAX_MESSAGE_BYTES, 2)
    match json.loads(answer):
        case [str() as kind, str() as reason]:
            words = (key.image, reason) if kind == "no_image" else (reason,)
            channel.sendall(encode("error", kind, *words))
            return
    to_inside, from_inside = descriptors
    try:
        with contextlib.suppress(BrokenPipeError):  # it ended
            _write(to_inside, first)
            _pass_on(channel, to_inside, from_inside)
    finally:
        # The end of input ends the in-sandbox server.
        os.close(to_inside)
        if not _ends(from_inside, _LEAVE_SECONDS):
            asking.send(b"kill")
            _ends(from_inside, _KILL_SECONDS)


def _hear_spec(channel: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """Returns the bytes that the client sent up to its set-up request, and its spec, by name."""
    frames, heard = Frames(), bytearray()
    while True:
        data = channel.recv(_CHUNK)
        if not data:
            raise SystemExit  # closed before it was set up
        heard += data
        for frame in frames.feed(data):
            return bytes(heard), frame[1]


def _wait_unless_closed(channel: socket.socket, asking: socket.socket) -> None:
    """Waits for an answer; ends the process if the client goes meanwhile."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.register(asking, select.POLLIN)
    if all(descriptor == channel.fileno() for descriptor, _ in poll.poll()):
        raise SystemExit


def _pass_on(channel: socket.socket, to_inside: int, from_inside: int) -> None:
    """Copies bytes both ways until either end is closed.

    Blocking writes are safe: both ends read what they are sent.
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(from_inside, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == channel.fileno():
                data = channel.recv(_CHUNK)
                _write(to_inside, data)
            else:
                data = os.read(descriptor, _CHUNK)
                channel.sendall(data)
            if not data:
                return


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _ends(output: int, seconds: float) -> bool:
    """Whether the in-sandbox server tells in time that it has ended; what else comes is dropped."""
    until = time.monotonic() + seconds
    poll = select.poll()
    poll.register(output, select.POLLIN)
    while (left := until - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            data = os.read(output, _CHUNK)
            if not data or data.endswith(CONTAINER_ENDED):
                return True
    return False
