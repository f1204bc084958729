"""The parent of all workers: preloaded and single-threaded; it forks, watches and kills them.

    server --(fork id + socket, kill id)--> forkserver --(forked, lines, exit)--> server

Invariants: it dies with the server; a worker's whole process tree dies with the worker (each worker
adopts the orphans among its descendants, the forkserver those of a dead worker, and it kills every
child that is not a worker); workers' output never waits for the server to read it; it never sees a
secret: its environment variables are an allow-list.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import ConfigError, EnvserverError

from .. import registry
from ..environment import Environment
from ..folders import import_for
from ..sandbox import outer
from ..sandbox.backend import NamespaceBackend
from ..sandbox.wire import NAMESPACE_BACKENDS
from . import linux
from .lean import LeanParent, load
from .messages import READ_BYTES, Boot, WorkerSandbox
from .output import OutputLimiter
from .process import OUTSIDE, WorkerSpec
from .sandboxed import LOOK_SECONDS, Watch, fork_worker, prepare_for_workers

LOOK_ROUND_SECONDS = 1.0


@dataclass
class _Worker:
    id: str
    pid: int
    output_fd: int
    lines: OutputLimiter
    directory: Path
    user: int | None
    watch: Watch | None
    oom_kills: int = field(default_factory=linux.out_of_memory_kills)


def main(
    boot_json: str, seen: dict[str, Any], lean: LeanParent | None, failure: OSError | None
) -> None:
    boot = msgspec.json.decode(boot_json, type=Boot)
    control = socket.socket(fileno=boot.control_fd)
    try:
        if failure is not None:
            raise failure
        ours = linux.open_descriptors()
        companions = _preload(boot.references)
        users = _users(boot)
        opened = linux.open_descriptors() - ours
        for function in companions:
            _load(function, lean if len(companions) == 1 else None)
        forkserver = Forkserver(boot, control, opened, users, seen, lean)
        if boot.sandbox is None:
            forkserver.run()
        else:
            _run_sandboxed(boot, boot.sandbox, forkserver)
    except EnvserverError as error:
        control.send(msgspec.msgpack.encode(["broken", error.kind, error.message, error.hint]))
    except OSError as error:
        if boot.sandbox is None:
            raise
        message = f"The sandbox {boot.sandbox.backend!r} of workers cannot be made: {error}."
        hint = "`envserver doctor` shows what this machine can do."
        control.send(msgspec.msgpack.encode(["broken", ConfigError.kind, message, hint]))


def _users(boot: Boot) -> list[int | None]:
    """Returns user ids for sandboxed workers: one per worker if the server is root."""
    first = outer.first_user("worker", boot.most_workers) if boot.sandbox is not None else None
    if first is None:
        return [None] * boot.most_workers
    return list(range(first, first + boot.most_workers))


def _run_sandboxed(boot: Boot, sandbox: WorkerSandbox, forkserver: Forkserver) -> None:
    """Enters the outer layer: afterwards it sees only what its workers may see."""
    root = Path(boot.root, "outer")
    root.mkdir(mode=0o711)
    Path(boot.root).chmod(0o711)  # lets workers have their own users
    outer.enter(sandbox.backend, str(root), forkserver.seen, forkserver.run, shown=sandbox.shown)


class Forkserver:
    def __init__(
        self,
        boot: Boot,
        control: socket.socket,
        opened_by_imports: set[int],
        users: list[int | None],
        seen: dict[str, Any],
        lean: LeanParent | None,
    ) -> None:
        self._boot = boot
        self.seen = seen
        """The file view of sandboxed workers; see `sandbox.system.describe`."""
        self._users = users
        self._control = control
        self._lean = lean if lean is not None and lean.function else None
        self._kept_descriptors = opened_by_imports
        self._workers: dict[int, _Worker] = {}
        self._others: set[int] = set()
        """Children that are not workers but may live: started by imports, or removing files."""
        self._selector = selectors.DefaultSelector()
        self._wakeup = socket.socketpair()
        self._stopping = False
        self._next_look = 0.0

    def run(self) -> None:
        """Runs until the server closes its end, or dies."""
        self._others |= set(linux.children())
        gc.freeze()  # what imports made stays, and is shared with the workers
        gc.enable()
        if self._in_own_namespace:
            prepare_for_workers(self.seen)
        self._listen_to_signals()
        self._selector.register(self._control, selectors.EVENT_READ, self._obey)
        if self._lean is not None:
            self._selector.register(self._lean, selectors.EVENT_READ, self._lean.hear)
        self._tell("up", os.getpid())
        try:
            while not self._stopping:
                watching = self._in_own_namespace and self._workers
                seconds = LOOK_SECONDS if watching else LOOK_ROUND_SECONDS
                for key, _ in self._selector.select(seconds):
                    key.data()
                self._look_at_workers()
                self._reap()
                self._kill_orphans()
        finally:
            self._kill_everything()

    def _listen_to_signals(self) -> None:
        """SIGCHLD wakes the loop; SIGTERM (the server is gone) ends it."""
        reading, writing = self._wakeup
        reading.setblocking(False)
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._selector.register(reading, selectors.EVENT_READ, lambda: reading.recv(4096))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stopping", True))

    # What the server asks for.

    def _obey(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, READ_BYTES, 1)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._stopping = True
            return
        command, worker_id = msgspec.msgpack.decode(data, type=tuple[str, str])
        if command == "fork":
            self._fork(worker_id, socket.socket(fileno=descriptors[0]))
        else:
            self._kill(worker_id)

    @property
    def _in_own_namespace(self) -> bool:
        sandbox = self._boot.sandbox
        return sandbox is not None and sandbox.backend in NAMESPACE_BACKENDS

    def _fork(self, worker_id: str, control: socket.socket) -> None:
        user = self._users.pop() if self._users else None
        directory = self._directory_for(worker_id, user)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        companion, descriptors = self._lean.prepare() if self._lean is not None else (None, [])
        spec = WorkerSpec(
            control=control,
            output_fd=writing,
            directory=directory,
            parent_pid=OUTSIDE if self._in_own_namespace else os.getpid(),
            kept_descriptors=self._kept_descriptors,
            heartbeat_seconds=self._boot.heartbeat_seconds,
            companion=companion,
            sandbox=self._boot.sandbox,
            seen=self.seen,
            user=user,
            hand_out=partial(self._hand_out, worker_id),
        )
        try:
            pid = fork_worker(spec)
        except OSError as error:
            os.close(reading)
            self._tell("exit", worker_id, None, f"it could not be forked: {error}", False, 0.0, 0.0)
        else:
            lines, watch = OutputLimiter(time.monotonic()), self._watch(pid)
            worker = _Worker(worker_id, pid, reading, lines, directory, user, watch)
            self._workers[pid] = worker
            self._selector.register(reading, selectors.EVENT_READ, lambda: self._read(worker))
            # A pid of this namespace means another process in the server's.
            self._tell("forked", worker_id, None if self._in_own_namespace else pid)
            if self._lean is not None:
                self._lean.fork(worker_id, pid, descriptors, writing)
        if companion is not None:
            companion.close()
        for descriptor in (writing, *descriptors):
            os.close(descriptor)
        control.close()

    def _directory_for(self, worker_id: str, user: int | None) -> Path:
        if self._in_own_namespace:
            return Path(NamespaceBackend.work)
        directory = Path(self._boot.root) / worker_id
        directory.mkdir(mode=0o700)
        if user is not None:
            os.chown(directory, user, user)
        return directory

    def _watch(self, pid: int) -> Watch | None:
        sandbox = self._boot.sandbox
        return Watch(sandbox, pid) if sandbox is not None and self._in_own_namespace else None

    def _hand_out(self, worker_id: str, listener: socket.socket) -> None:
        message = msgspec.msgpack.encode(["listening", worker_id])
        socket.send_fds(self._control, [message], [listener.fileno()])

    def _kill(self, worker_id: str) -> None:
        for pid, worker in self._workers.items():
            if worker.id == worker_id:
                linux.kill_group(pid)  # not reaped yet, so the pid is still its own
                linux.kill(pid)  # it may not have called setsid yet

    # What happens to workers.

    def _read(self, worker: _Worker) -> bool:
        try:
            data = os.read(worker.output_fd, READ_BYTES)
        except BlockingIOError:
            return False
        now = time.monotonic()
        lines = worker.lines.feed(data, now) if data else worker.lines.finish(now)
        self._pass_on(worker, lines, worker.lines.take_dropped(now))
        if not data:
            self._selector.unregister(worker.output_fd)
        return bool(data)

    def _pass_on(self, worker: _Worker, lines: list[str], dropped: int) -> None:
        if not lines and not dropped:
            return
        message = msgspec.msgpack.encode(["lines", worker.id, lines, dropped])
        try:
            self._control.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:  # the server is busy; the next lines report the loss
            worker.lines.dropped_bytes += dropped + sum(len(line) for line in lines)
        except ConnectionError:
            self._stopping = True

    def _look_at_workers(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for pid, worker in self._workers.items():
            # Reports what was dropped while the server was busy, if no line has since.
            self._pass_on(worker, [], worker.lines.take_dropped(now))
            trouble = worker.watch.trouble() if worker.watch is not None else ""
            if trouble:
                words = f"The worker {trouble}.\n"
                self._pass_on(worker, worker.lines.feed(words.encode(), now), 0)
                linux.kill(pid)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            self._others.discard(pid)
            worker = self._workers.pop(pid, None)
            if worker is not None:
                linux.kill_group(pid)  # before it is reaped: its pid cannot be reused yet
            _, status, used = os.wait4(pid, 0)
            if worker is not None:
                self._finish(worker, status, used)

    def _finish(self, worker: _Worker, status: int, used: resource.struct_rusage) -> None:
        while worker.output_fd in self._selector.get_map() and self._read(worker):
            continue
        lines = worker.lines.finish(time.monotonic())
        self._pass_on(worker, lines, worker.lines.take_dropped())
        if worker.output_fd in self._selector.get_map():
            self._selector.unregister(worker.output_fd)
        os.close(worker.output_fd)
        starved = linux.out_of_memory_kills() > worker.oom_kills
        if not self._in_own_namespace:
            self._remove(worker.directory)
        self._users.append(worker.user)
        cpu_seconds, peak_memory_mb = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
        if self._lean is not None:
            others_seconds, others_peak_mb = self._lean.used(worker.id)
            cpu_seconds += others_seconds
            peak_memory_mb = max(peak_memory_mb, others_peak_mb)
        tail = worker.lines.tail()
        self._tell("exit", worker.id, status, tail, starved, cpu_seconds, peak_memory_mb)

    def _kill_orphans(self) -> None:
        """Kills what dead workers left: any child that is neither a worker nor known."""
        for pid in linux.children():
            if pid not in self._workers and pid not in self._others:
                linux.kill(pid)

    def _remove(self, directory: Path) -> None:
        """Removes a worker's directory; a full one in a separate process: it may take long."""
        try:
            directory.rmdir()
        except OSError:
            own_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                linux.die_with_parent(own_pid, signal.SIGKILL)
                shutil.rmtree(directory, ignore_errors=True)
                os._exit(0)
            self._others.add(pid)

    def _kill_everything(self) -> None:
        self._others.clear()
        for pid in self._workers:
            linux.kill_group(pid)
        linux.kill_descendants()

    def _tell(self, *message: str | float | bool | None) -> None:
        try:
            self._control.send(msgspec.msgpack.encode(message))
        except ConnectionError:
            self._stopping = True


def _load(function: str, lean: LeanParent | None) -> None:
    """Imports the module of companions: in the lean parent, or here for agents that fork them."""
    error = load(function)[1] if lean is None else lean.load(function)
    if error:
        raise ConfigError(f"The companion {function!r} cannot be imported: {error}")


def _preload(references: list[str]) -> set[str]:
    """Imports what every worker needs; returns the functions of companions that sandboxed
    environments name."""
    for name in ("uvloop", "encodings.idna"):  # the second at the first connection
        importlib.import_module(name)
    classes = [registry.find(reference) for reference in references]
    for environment in classes:
        environment.Config.model_rebuild()
        if environment.isolation != "pooled":
            _import_all(environment)
        if environment.isolation == "sandboxed":  # for MCP servers: a sandbox does not have it
            importlib.import_module("envserver_records.servers")
    if threads := _threads():
        sys.stderr.write(
            f"{', '.join(references)}: importing started {len(threads)} threads "
            f"({', '.join(sorted(set(threads)))}), which do not exist in workers. Start threads in "
            "setup() instead.\n"
        )
    return {each.companion for each in classes if each.companion and each.isolation == "sandboxed"}


def _threads() -> list[str]:
    """Returns the names of this process's other threads, as the kernel knows them.

    An allocator's own thread does not count: it knows of forks.
    """
    tasks = Path("/proc/self/task").iterdir()
    others = (task for task in tasks if task.name != str(os.getpid()))
    names = ((task / "comm").read_text().strip() for task in others)
    return [name for name in names if not name.startswith("jemalloc")]


def _import_all(environment: type[Environment]) -> None:
    for name in environment.preload:
        try:
            import_for(environment.__module__, name)
        except ImportError as error:
            message = f"Environment {environment.name!r} cannot preload {name!r}: {error}."
            raise ConfigError(message, hint="Install it, or leave it out of `preload`.") from error
