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
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import msgspec

from . import linux
from .docker import (
    PULL_SECONDS,
    ContainerKey,
    Engine,
    bundle,
    command,
    key_of,
    last_line,
)
from .wire import CONTAINER_ENDED, CONTAINER_READY, MAX_MESSAGE_BYTES, Frames, encode

# Everything runs in the maker's one thread: what takes time is a command of the engine, whose end
# its selector reports.

_START_SECONDS = 120.0
_INSPECT_SECONDS = 60.0
_LINGER_SECONDS = 10.0
"""For a container whose sandbox is closed to be gone; then the engine is asked to kill it."""
_END_SECONDS = 15.0
"""For that; then the engine's command is killed."""
_WARM_SECONDS = 120.0
"""For so long after its last use a kind of container is kept warm."""
_USES_FOR_ONE = 4
"""So many uses of a kind, and one of it is kept warm; twice as many, and two are."""
_QUIET_SECONDS = 1.0
"""After one was given out: a start would slow down what that sandbox does first."""
_KEPT_BYTES = 4096
_LOOK_SECONDS = 0.02


class NoContainer(Exception):
    kind = "unavailable"


class NoImage(NoContainer):
    kind = "no_image"


class Child:
    """A command of the engine that runs; its end, and the end of its errors, are reported.

    Args:
        then: called with its exit status.
        talks: its input and output are pipes, too.
    """

    def __init__(
        self,
        pool: Pool,
        words: list[str],
        seconds: float,
        then: Callable[[int], None],
        *,
        talks: bool = False,
    ) -> None:
        ours, engine = os.getpid(), pool.engine
        self.argv = [engine.program, *words]
        self._selector = selector = pool.selector
        self._then = then
        self.expires = time.monotonic() + seconds
        self.errors = b""
        self.process = subprocess.Popen(
            self.argv,
            env=engine.variables,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=lambda: linux.die_with(ours, signal.SIGKILL),
        )
        self._stderr = cast(IO[bytes], self.process.stderr)
        self._pidfd = os.pidfd_open(self.process.pid)
        selector.register(self._stderr, selectors.EVENT_READ, self._hear)
        selector.register(self._pidfd, selectors.EVENT_READ, self._ended)

    def _hear(self) -> None:
        data = os.read(self._stderr.fileno(), _KEPT_BYTES)
        self.errors = (self.errors + data)[-_KEPT_BYTES:]
        if not data:
            self._selector.unregister(self._stderr)
            self._stderr.close()

    def _ended(self) -> None:
        if not self._stderr.closed:  # a process that it left may hold the other end
            os.set_blocking(self._stderr.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                while not self._stderr.closed:
                    self._hear()
        if not self._stderr.closed:
            self._selector.unregister(self._stderr)
            self._stderr.close()
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        self._then(self.process.wait())


class Container(Child):
    """A container from its start to its end; talks by `stdin` and `stdout`."""

    def __init__(self, pool: Pool, name: str, key: ContainerKey) -> None:
        self.name = name
        self.key = key
        self.unsent = memoryview(bundle(key.preload))
        self.ready = False
        self.ending = 0
        words = command(pool.engine, name, key, len(self.unsent))
        super().__init__(pool, words, _START_SECONDS, partial(pool.ended, self), talks=True)
        self.stdin = cast(IO[bytes], self.process.stdin)
        self.stdout = cast(IO[bytes], self.process.stdout)


@dataclass(eq=False)
class Wanted:
    """A container that a sandbox waits for; `give` is called with it, or with why there is none."""

    key: ContainerKey
    give: Callable[[Container | NoContainer], None]


@dataclass
class _Use:
    """How often a kind of container was wanted while it was kept warm, and when last."""

    times: int = 0
    last: float = field(default_factory=time.monotonic)


class Pool:
    """The containers of one maker: those that start, are kept warm, and are in use."""

    def __init__(self, engine: Engine, selector: selectors.BaseSelector) -> None:
        self.engine = engine
        self.selector = selector
        self._waiting: list[Wanted] = []
        self._starting: list[Container] = []
        self._warm: list[Container] = []
        self._others: list[Container] = []
        """Taken, or on their way out."""
        self._uses: dict[ContainerKey, _Use] = {}
        self._images: set[str] = {engine.image}
        self._asked: dict[str, Child] = {}
        """By image: a command that looks for it, or fetches it."""
        self._next_start = 0.0
        self._quiet_at = 0.0

    def want(self, wanted: Wanted) -> None:
        use = self._uses.setdefault(wanted.key, _Use())
        use.times, use.last = use.times + 1, time.monotonic()
        self._waiting.append(wanted)
        self.tend()

    def give_up(self, wanted: Wanted) -> None:
        if wanted in self._waiting:
            self._waiting.remove(wanted)

    def returned(self, container: Container) -> None:
        """Its sandbox is closed: ends it, unless it is about to end by itself."""
        container.expires = min(container.expires, time.monotonic() + _LINGER_SECONDS)

    def kill(self, container: Container) -> None:
        """Ends a container that does not end by itself."""
        container.ending += 1
        container.expires = time.monotonic() + _END_SECONDS
        if container.ending > 1:  # the engine did not do it
            container.process.kill()
            return
        self._command(["kill", container.name], _END_SECONDS)

    def seconds_left(self) -> float | None:
        """Until `tend` has something to do; None: until something happens."""
        now = time.monotonic()
        times = [child.expires for child in self._asked.values()]
        times += [each.expires for each in (*self._starting, *self._others)]
        times += [use.last + _WARM_SECONDS for use in self._uses.values()]
        if len(self._starting) < self.engine.starts:
            if self._waiting or self._lacking():
                times.append(self._next_start)
            times.append(self._quiet_at if self._quiet_at > now else float("inf"))
        left = min(times, default=float("inf")) - now
        return None if left == float("inf") else max(_LOOK_SECONDS, left)

    def tend(self) -> None:
        self._expire()
        self._give_out()
        self._start_wanted()
        self._keep_warm()

    # Giving out.

    def _give_out(self) -> None:
        for wanted in list(self._waiting):
            found = next((each for each in self._warm if each.key == wanted.key), None)
            if found is not None:
                self._waiting.remove(wanted)
                self._warm.remove(found)
                self._others.append(found)
                found.expires = float("inf")
                self._quiet_at = time.monotonic() + _QUIET_SECONDS
                wanted.give(found)

    def _refuse(self, reason: NoContainer, fits: Callable[[Wanted], bool], most: int) -> None:
        for wanted in [each for each in self._waiting if fits(each)][:most]:
            self._waiting.remove(wanted)
            wanted.give(reason)

    # Starting.

    def _start_wanted(self) -> None:
        on_the_way = [container.key for container in self._starting]
        for wanted in list(self._waiting):
            if wanted.key in on_the_way:
                on_the_way.remove(wanted.key)
            elif wanted.key.image not in self._images:
                self._look_for(wanted.key.image)
            elif self._may_start():
                self._start(wanted.key)

    def _may_start(self) -> bool:
        if len(self._starting) >= self.engine.starts:
            return False
        return time.monotonic() >= self._next_start

    def _start(self, key: ContainerKey) -> None:
        now = time.monotonic()
        self._next_start = max(now, self._next_start) + 1.0 / self.engine.starts_per_second
        name = f"{self.engine.prefix}-{uuid.uuid4().hex[:12]}"
        try:
            container = Container(self, name, key)
        except OSError as error:  # no process, no memory, no descriptor
            self._refuse(NoContainer(str(error)), lambda wanted: wanted.key == key, 1)
            return
        self._starting.append(container)
        os.set_blocking(container.stdin.fileno(), False)
        send, hear = partial(self._send, container), partial(self._hear, container)
        self.selector.register(container.stdin, selectors.EVENT_WRITE, send)
        self.selector.register(container.stdout, selectors.EVENT_READ, hear)

    def _send(self, container: Container) -> None:
        try:
            done = os.write(container.stdin.fileno(), container.unsent)
        except BlockingIOError:
            return
        except OSError:  # it has ended; its end is reported
            done = len(container.unsent)
        container.unsent = container.unsent[done:]
        if not container.unsent:
            self.selector.unregister(container.stdin)
            os.set_blocking(container.stdin.fileno(), True)

    def _hear(self, container: Container) -> None:
        self.selector.unregister(container.stdout)
        container.ready = os.read(container.stdout.fileno(), 1) == CONTAINER_READY
        if container.ready and container in self._starting:
            self._starting.remove(container)
            self._warm.append(container)
            container.expires = float("inf")

    def ended(self, container: Container, status: int) -> None:
        for pipe in (container.stdin, container.stdout):
            if not pipe.closed:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(pipe)
                pipe.close()
        for group in (self._warm, self._others):
            if container in group:
                group.remove(container)
        if container in self._starting:
            self._starting.remove(container)
            self._images.discard(container.key.image)  # perhaps that is why
            key = container.key
            reason = last_line(container.errors) or f"{container.argv[0]} ended with {status}"
            self._uses.pop(key, None)
            self._refuse(NoContainer(reason), lambda wanted: wanted.key == key, 1)

    # Images.

    def _look_for(self, image: str) -> None:
        if image not in self._asked:
            self._command(["image", "inspect", image], _INSPECT_SECONDS, image)

    def _looked(self, image: str, status: int) -> None:
        child = self._asked.pop(image)
        if status == 0:
            self._images.add(image)
        elif self.engine.pull == "missing" and child.argv[1] != "pull":
            self._command(["pull", "--quiet", image], PULL_SECONDS, image)
        else:
            reason = NoImage(last_line(child.errors) or f"looking for it ended with {status}")
            self._refuse(reason, lambda wanted: wanted.key.image == image, len(self._waiting))

    def _command(self, words: list[str], seconds: float, image: str = "") -> None:
        """Runs a command of the engine. `image`: that it looks for or fetches."""
        then = partial(self._looked, image) if image else lambda status: None
        try:
            child = Child(self, words, seconds, then)
        except OSError as error:
            if image:
                reason = NoContainer(str(error))
                self._refuse(reason, lambda wanted: wanted.key.image == image, 1)
            return
        if image:
            self._asked[image] = child

    # Warm ones.

    def _targets(self) -> dict[ContainerKey, int]:
        """How many are to be warm, by kind: those last used come first.

        Where each task has an image of its own, a kind is used a few times only, and what was
        started in advance for it would be started for nothing.
        """
        now, room, targets = time.monotonic(), self.engine.most_warm, {}
        for key, use in sorted(self._uses.items(), key=lambda item: -item[1].last):
            deserved = use.times // _USES_FOR_ONE if now - use.last < _WARM_SECONDS else 0
            targets[key] = min(self.engine.warm, room, deserved)
            room -= targets[key]
        return targets

    def _unused(self, key: ContainerKey) -> int:
        """How many of a kind are warm, or will be when all who wait have one."""
        all_of_it = sum(each.key == key for each in (*self._warm, *self._starting))
        return all_of_it - sum(wanted.key == key for wanted in self._waiting)

    def _lacking(self) -> list[ContainerKey]:
        is_quiet = time.monotonic() >= self._quiet_at
        return [
            key
            for key, most in self._targets().items()
            if (unused := self._unused(key)) < most and (is_quiet or unused <= 0)
        ]

    def _keep_warm(self) -> None:
        targets = self._targets()
        for container in list(self._warm):
            if self._unused(container.key) > targets.get(container.key, 0):
                self._warm.remove(container)
                self._others.append(container)
                self._hang_up(container)
        old = time.monotonic() - _WARM_SECONDS
        self._uses = {key: use for key, use in self._uses.items() if use.last > old}
        if not self._waiting:
            for key in self._lacking():
                if self._may_start():
                    self._start(key)

    # Ending.

    def _hang_up(self, container: Container) -> None:
        """The end of its input ends the in-sandbox server, and so the container."""
        container.stdin.close()
        self.returned(container)

    def _expire(self) -> None:
        now = time.monotonic()
        for container in [*self._starting, *self._others]:
            if now > container.expires:
                self.kill(container)
        for child in self._asked.values():
            if now > child.expires:
                child.process.kill()


_CHUNK = 2**18
_LEAVE_SECONDS = 2.0
"""For a container to end when its input has; then it is killed."""
_KILL_SECONDS = 6.0


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    control_fd: int
    supervisor_pid: int
    engine: Engine


def main(boot_json: str) -> None:
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
        self._pool = Pool(boot.engine, self._selector)
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
            with contextlib.suppress(OSError):
                relay.send(json.dumps([found.kind, str(found)]).encode())
            return
        self._given[relay] = found
        with found.stdin, found.stdout, contextlib.suppress(OSError):
            pipes = [found.stdin.fileno(), found.stdout.fileno()]
            socket.send_fds(relay, [b'["container"]'], pipes)


def _serve(channel_fd: int, asking_fd: int, engine: Engine, maker_pid: int) -> NoReturn:
    """Failures are written to standard error; the client sees that its sandbox is lost."""
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
    """The bytes that the client sent up to its set-up request, and its spec, by name."""
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
