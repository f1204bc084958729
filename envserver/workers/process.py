"""The worker process: obeys the control socket, sends heartbeats, and runs attempts as tasks.

A heartbeat goes out four times per `heartbeat_seconds` while the event loop is responsive, so a
blocked loop is detected. The worker ends at once when the server closes its end of the socket.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import uvloop
from envserver_records.framing import FrameReader

from . import linux
from .attempt import Instances, WorkerAttempt, WorkerResources
from .companions import Companion, give_companion
from .handle import EXIT_CRASHED
from .messages import BEATS_PER_SILENCE, WorkerSandbox, decode, encode
from .output import kept_stream
from .run import HttpClient

MAX_THREADS = 1024


class _Link:
    """The socket to the server. Any thread may send."""

    def __init__(self, control: socket.socket, beat_seconds: float) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._frames = FrameReader()
        self.beat_seconds = beat_seconds

    def fileno(self) -> int:
        return self._control.fileno()

    def send(self, *parts: str) -> None:
        with self._lock:
            try:
                self._control.sendall(encode(*parts))
            except ConnectionError:
                _end_with_the_server()

    def receive(self) -> Iterator[list[str]]:
        """Returns the frames that have arrived; never waits."""
        try:
            data = self._control.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            _end_with_the_server()
        yield from map(decode, self._frames.feed(data))

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Sends heartbeats from a thread while imports or an environment's setup may block the
        loop."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self.beat_seconds):
                self.send("beat")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class _Worker:
    def __init__(self, link: _Link) -> None:
        self._link = link
        self._attempts: dict[str, WorkerAttempt] = {}
        self._stop: asyncio.Future[None]

    async def run(self) -> None:
        """Returns when asked to stop; raises, which ends the process, when the worker's own code
        fails."""
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        loop.set_task_factory(_owned_task)
        threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="rollout")
        instances = Instances(self._link.beating)
        async with HttpClient() as http, asyncio.TaskGroup() as self._tasks:
            self._workshop = WorkerResources(http, instances, threads)
            loop.add_reader(self._link.fileno(), self._obey)
            self._link.send("ready")
            beats = self._tasks.create_task(self._beat())
            await self._stop
            beats.cancel()
            for attempt in self._attempts.values():
                attempt.cancel()
        await instances.close()
        await _cancel_the_rest(asyncio.all_tasks() - {asyncio.current_task()})
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()  # what an environment saves in a thread is saved

    async def _beat(self) -> None:
        while True:
            self._link.send("beat")
            await asyncio.sleep(self._link.beat_seconds)

    def _obey(self) -> None:
        try:
            for frame in self._link.receive():
                self._obey_one(frame)
        except ValueError as error:
            if not self._stop.done():
                self._stop.set_exception(error)

    def _obey_one(self, frame: list[str]) -> None:
        match frame:
            case ["run", rollout_id, url, job]:
                attempt = WorkerAttempt(rollout_id, url, job, self._workshop)
                self._attempts[rollout_id] = attempt
                self._tasks.create_task(self._perform(attempt))
            case ["cancel", rollout_id]:
                if rollout_id in self._attempts:
                    self._attempts[rollout_id].cancel()
            case ["stop"]:
                if not self._stop.done():
                    self._stop.set_result(None)
            case _:
                raise ValueError(f"the server sent {frame}")

    async def _perform(self, attempt: WorkerAttempt) -> None:
        owned: WeakSet[asyncio.Task[Any]] = WeakSet()
        token = _owner.set(owned)
        try:
            await attempt.run()
        finally:
            _owner.reset(token)
        await _cancel_the_rest(owned)
        del self._attempts[attempt.rollout_id]
        if attempt.result is not None:
            self._link.send("done", attempt.rollout_id, attempt.result.decode())
        elif attempt.posted or not self._stop.done():  # else the end of the pool interrupted it
            self._link.send("done", attempt.rollout_id)


_owner: ContextVar[WeakSet[asyncio.Task[Any]] | None] = ContextVar("owner", default=None)
"""The tasks of the attempt to which the current context belongs."""


def _owned_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None, **options: Any
) -> asyncio.Task[Any]:
    """A task factory that records which attempt a task belongs to, however deep it was started."""
    if context is not None:
        options["context"] = context
    task = asyncio.Task(coroutine, loop=loop, **options)
    owned = _owner.get() if context is None else context.get(_owner)
    if owned is not None:
        owned.add(task)
    return task


async def _cancel_the_rest(tasks: Set[asyncio.Task[Any]]) -> None:
    """Cancels tasks that an agent, or an environment's setup, left behind.

    Waits without a limit: the rollout is not done before, and at its deadline the worker is killed.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def _end_with_the_server() -> None:
    """Kills this process and all that it started: the server is gone."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # process 1 of a namespace does not receive its own signals


OUTSIDE = 0


@dataclass(frozen=True)
class WorkerSpec:
    """The data that a forked child needs to become a worker.

    Args:
        directory: its own, for the current directory, HOME and TMPDIR.
        parent_pid: the process whose end is its own; OUTSIDE: of another namespace.
        kept_descriptors: what the environments opened while they were imported.
        sandbox: None: the worker has none, nor the fields below.
        seen: what it will see; see `sandbox.system.describe`.
        user: None: the current user, who is not root.
        hand_out: in a worker with its own network, gives a listening socket to the server.
    """

    control: socket.socket
    output_fd: int
    directory: Path
    parent_pid: int
    kept_descriptors: set[int]
    heartbeat_seconds: float
    companion: Companion | None
    sandbox: WorkerSandbox | None
    seen: dict[str, Any]
    user: int | None
    hand_out: Callable[[socket.socket], None]


def worker_main(spec: WorkerSpec) -> NoReturn:
    """Turns this process, just forked, into a worker; ends with it, running no exit handler."""
    code = EXIT_CRASHED
    try:
        _leave_the_forkserver(spec)
        _settle_in(spec)
        spec.control.setblocking(True)
        worker = _Worker(_Link(spec.control, spec.heartbeat_seconds / BEATS_PER_SILENCE))
        uvloop.new_event_loop().run_until_complete(worker.run())  # closed by the end of the process
        code = 0
    except BaseException:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _leave_the_forkserver(spec: WorkerSpec) -> None:
    """Own session, process group and death pact; no descriptor or handler of the forkserver."""
    os.setsid()
    linux.die_with_parent(spec.parent_pid, signal.SIGKILL)
    linux.adopt_orphans()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if spec.parent_pid != OUTSIDE:  # else it is deaf to these
        for number in (signal.SIGTERM, signal.SIGINT):  # each ends us, and is seen
            signal.signal(number, signal.SIG_DFL)
    os.dup2(spec.output_fd, 1)
    os.dup2(spec.output_fd, 2)
    kept = {0, 1, 2, spec.control.fileno(), *spec.kept_descriptors}
    if spec.companion is not None:
        kept |= spec.companion.descriptors
    linux.close_all_but(kept)
    linux.limit_resources()


def _settle_in(spec: WorkerSpec) -> None:
    os.chdir(spec.directory)
    os.environ["HOME"] = os.environ["TMPDIR"] = str(spec.directory)
    tempfile.tempdir = None
    sys.stdout, sys.stderr = kept_stream(1, "stdout"), kept_stream(2, "stderr")
    faulthandler.enable()
    linux.new_random_numbers()
    if spec.companion is not None:
        _expect(spec.companion)


def _expect(companion: Companion) -> None:
    """Waits for the companion to join; without one, agents fork what they need."""
    if companion.joined():
        give_companion(companion)
    else:
        sys.stderr.write("The companion of this worker could not start.\n")
