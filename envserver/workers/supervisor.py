"""Keeps a forkserver alive and tracks every worker that it forked.

`fork` returns handles; when the forkserver dies, its workers die too, and a new one is started.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import orjson
import structlog
from envserver_records.errors import ConfigError, EnvserverError, NotFoundError, WorkerDied
from envserver_records.waiting import Backoff

from ..registry import interpreter_of
from ..registry.interpreters import PYTHON_VARIABLES
from ..sandbox.places import temporary_folder
from ..sandbox.wire import NAMESPACE_BACKENDS
from ..settings.config import WorkersConfig
from . import linux
from .handle import ProcessEnd, WorkerHandle
from .messages import BEATS_PER_SILENCE, READ_BYTES, Boot
from .output import OutputLimiter

# The kernel ends a forkserver with the thread that started it, so the event loop needs a lasting
# thread.

IMPORT_SECONDS = 300.0
"""Seconds for the environments' imports; some load a machine-learning framework."""
END_SECONDS = 8.0

_INHERITED = {"PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", *PYTHON_VARIABLES}
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""Variables of a parent of workers in namespaces, whose few threads hardly allocate at the same
time: a heap of its own for each would be more pages that a fork writes to. Programs of workers do
not get them."""
_START = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from envserver.workers.forkserver_start import main; main(sys.argv[2])"
)


def environment_variables(server: Mapping[str, str], home: str) -> dict[str, str]:
    """Returns the workers' environment variables: an allow-list of the server's, and a few more.

    Numeric libraries are limited to one thread: many workers share the cores, and threads do not
    fork.
    """
    kept = {
        name: value
        for name, value in server.items()
        if name in _INHERITED or name.startswith("LC_")
    }
    return {**kept, **dict.fromkeys(_ONE_THREAD, "1"), "HOME": home, "TMPDIR": home}


class ForkserverProcess:
    """One forkserver, in the interpreter of the first environment; several share one interpreter.

    Args:
        on_message: gets each message about a worker: ["forked", id, pid],
            ["lines", id, lines, dropped bytes], ["listening", id, a listening socket of its
            network] or ["exit", id, status, last output, whether memory ran out,
            CPU seconds, peak memory in MB].
        on_gone: called once when the process is gone, unless `close` was called.
    """

    def __init__(
        self, boot: Boot, on_message: Callable[[list[Any]], None], on_gone: Callable[[], None]
    ) -> None:
        self._boot = boot
        self._on_message = on_message
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = self._loop.create_future()
        self._outbox: deque[tuple[bytes, socket.socket | None]] = deque()
        self._lines = OutputLimiter(self._loop.time())
        self._open = False

    async def start(self) -> None:
        self._spawn()
        try:
            async with asyncio.timeout(IMPORT_SECONDS):
                await self._up
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                references = ", ".join(self._boot.references)
                raise ConfigError(f"Importing {references} took over {IMPORT_SECONDS} s.") from None
            raise

    def _spawn(self) -> None:
        self.root = tempfile.mkdtemp(prefix="envserver-workers-", dir=temporary_folder())
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        boot = msgspec.structs.replace(
            self._boot, control_fd=theirs.fileno(), server_pid=os.getpid(), root=self.root
        )
        variables = environment_variables(os.environ, self.root)
        own = interpreter_of(boot.references[0]) if boot.references else None
        if own is None:
            python, path = sys.executable, [str(Path(entry).absolute()) for entry in sys.path]
        else:
            python, path = own.executable, own.search_path
            variables = {n: v for n, v in variables.items() if n not in PYTHON_VARIABLES}
        if boot.sandbox is not None and boot.sandbox.backend in NAMESPACE_BACKENDS:
            variables |= _ONE_HEAP
        self._process = subprocess.Popen(
            [python, "-c", _START, orjson.dumps(path).decode(), msgspec.json.encode(boot).decode()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            cwd=self.root,
            env=variables,
            start_new_session=True,
        )
        theirs.close()
        os.close(output)
        self._open = True
        self._loop.add_reader(self._control, self._receive)
        self._loop.add_reader(self._output, self._read_output)

    def fork(self, worker_id: str, control: socket.socket) -> None:
        """Asks for a worker that talks over `control`, which is then closed here."""
        self._post(["fork", worker_id], control)

    def kill(self, worker_id: str) -> None:
        """Asks to kill a worker and its process group; no error if it is gone."""
        self._post(["kill", worker_id])

    def abandon(self) -> None:
        """Kills a forkserver that does not answer; its workers die with it."""
        self._process.kill()

    async def close(self) -> None:
        """Ends it with all its workers; when this returns, none of them is left."""
        self._detach()
        until = self._loop.time() + END_SECONDS
        while self._process.poll() is None:
            if self._loop.time() > until:
                self._process.kill()
            await asyncio.sleep(0.005)
        self._clean_up_after_a_kill()

    def _clean_up_after_a_kill(self) -> None:
        if Path(self.root).exists():  # a forkserver that ends by itself leaves nothing
            linux.kill_marked(self.root)
            shutil.rmtree(self.root, ignore_errors=True)

    def _post(self, message: list[str], carried: socket.socket | None = None) -> None:
        if not self._open:
            if carried is not None:
                carried.close()
            return
        self._outbox.append((msgspec.msgpack.encode(message), carried))
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            data, carried = self._outbox[0]
            try:
                descriptors = [carried.fileno()] if carried is not None else []
                socket.send_fds(self._control, [data], descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._control, self._flush)
                return
            except ConnectionError:  # it is gone; reading finds the end and reports it
                break
            self._outbox.popleft()
            if carried is not None:
                carried.close()
        self._loop.remove_writer(self._control)

    def _receive(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, READ_BYTES * 4, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._lost()
            return
        message = msgspec.msgpack.decode(data, type=list[Any])
        if message[0] == "up":
            self._settle(None)
        elif message[0] == "broken":
            _, kind, text, hint = message
            error = NotFoundError if kind == NotFoundError.kind else ConfigError
            self._settle(error(text, hint=hint))
        else:
            self._on_message([*message, *(socket.socket(fileno=fd) for fd in descriptors)])

    def _lost(self) -> None:
        self._read_output()
        self._detach()
        text = f"The workers' parent process ended while it imported: {self._lines.tail()}"
        self._settle(ConfigError(text))
        self._on_gone()

    def _settle(self, error: EnvserverError | None) -> None:
        if self._up.done():
            return
        if error is None:
            self._up.set_result(None)
        else:
            self._up.set_exception(error)

    def _detach(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._loop.remove_reader(self._output)
        self._control.close()
        os.close(self._output)
        for _, carried in self._outbox:
            if carried is not None:
                carried.close()

    def _read_output(self) -> None:
        if not self._open:
            return
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output)
        now = self._loop.time()
        for line in self._lines.feed(data, now) if data else self._lines.finish(now):
            _log.info("forkserver_output", line=line)
        if dropped_bytes := self._lines.take_dropped(now):
            _log.warning("forkserver_output_dropped", bytes=dropped_bytes)


Listen = Callable[[socket.socket], Coroutine[Any, Any, asyncio.AbstractServer]]

KILL_SECONDS = 5.0
"""Seconds for the forkserver to report the exit of a killed worker."""
_BACKOFF = Backoff(first_seconds=0.1, max_seconds=5.0)

_log = structlog.get_logger("envserver.workers")


class Supervisor:
    """Manages the processes of one pool.

    Args:
        boot: arguments of the forkserver, without those of a single one.
        on_gone: called once for every worker, when it is gone.
        listen: serves the proxy on a listening socket, until the returned server is closed.
    """

    def __init__(
        self,
        config: WorkersConfig,
        boot: Boot,
        on_gone: Callable[[WorkerHandle], None],
        listen: Listen | None = None,
    ) -> None:
        self.handles: dict[str, WorkerHandle] = {}
        self._config = config
        self._boot = boot
        self._on_gone = on_gone
        self._listen = listen
        self._listening: dict[str, asyncio.Task[asyncio.AbstractServer]] = {}
        self._ids = itertools.count(1)
        self._up = asyncio.Event()
        self._lost = asyncio.Event()

    async def start(self) -> None:
        self._lost.clear()
        self._forkserver = ForkserverProcess(self._boot, self._hear, self._forkserver_gone)
        await self._forkserver.start()
        if not self._lost.is_set():
            self._up.set()

    async def keep(self) -> None:
        failures = 0
        while True:
            await self._lost.wait()
            await self._forkserver.close()
            await asyncio.sleep(_BACKOFF.seconds(failures))
            try:
                await self.start()
                failures = 0
            except EnvserverError as error:
                _log.error("forkserver_failed", error=str(error))
                failures += 1
                self._lost.set()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_seconds / BEATS_PER_SILENCE)
            for handle in list(self.handles.values()):
                handle.tick()

    async def fork(self) -> WorkerHandle:
        """Forks a worker that takes rollouts at once; waits while there is no forkserver."""
        handle = WorkerHandle(
            f"worker-{next(self._ids)}",
            self._config,
            kill=self._kill,
            on_gone=self._gone,
        )
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            hint = "Raise the limit of open files (ulimit -n), or let fewer rollouts run at a time."
            raise WorkerDied(f"No worker could be started: {error.strerror}.", hint=hint) from error
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: handle, sock=ours)
            await self._up.wait()
        except BaseException:
            ours.close()
            theirs.close()
            handle.discard()
            raise
        self.handles[handle.id] = handle
        self._forkserver.fork(handle.id, theirs)
        return handle

    async def stop(self) -> None:
        """Stops all workers, gracefully at first, and the forkserver; returns when all are gone."""
        self._up.clear()
        handles = list(self.handles.values())
        for handle in handles:
            handle.stop()
        try:
            async with asyncio.timeout(self._config.kill_grace_seconds + KILL_SECONDS):
                for handle in handles:
                    await handle.gone.wait()
        except TimeoutError:
            _log.warning("workers_do_not_end", workers=list(self.handles))
        finally:
            await self._forkserver.close()
            self._end_all("the pool was closed")

    def _hear(self, message: list[Any]) -> None:
        kind, worker_id, *facts = message
        handle = self.handles.get(worker_id)
        if handle is None:
            if kind == "listening":
                facts[0].close()
            return
        match kind:
            case "forked":
                (handle.pid,) = facts
            case "lines":
                _log_output(handle, *facts)
            case "listening":
                self._serve_on(worker_id, *facts)
            case "exit":
                end = ProcessEnd(*facts)
                # One that the kernel kills above its limit is itself the cause, not the machine.
                starved = end.out_of_memory and end.peak_memory_mb < self._config.memory_mb
                handle.ended(replace(end, out_of_memory=starved))

    def _serve_on(self, worker_id: str, listener: socket.socket) -> None:
        if self._listen is None:
            listener.close()
            return
        listener.setblocking(False)
        self._listening[worker_id] = asyncio.create_task(self._listen(listener))

    def _stop_serving(self, worker_id: str) -> None:
        task = self._listening.pop(worker_id, None)
        if task is not None and not task.cancel():
            task.result().close()

    def _kill(self, handle: WorkerHandle) -> None:
        if handle.gone.is_set():
            return
        self._forkserver.kill(handle.id)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._insist, handle, self._forkserver)

    def _insist(self, handle: WorkerHandle, forkserver: ForkserverProcess) -> None:
        if handle.end is None:
            _log.error("forkserver_does_not_answer", worker=handle.id)
            forkserver.abandon()

    def _gone(self, handle: WorkerHandle) -> None:
        del self.handles[handle.id]
        self._stop_serving(handle.id)
        self._on_gone(handle)

    def _forkserver_gone(self) -> None:
        self._up.clear()
        self._lost.set()
        _log.error("forkserver_ended", workers=len(self.handles))
        self._end_all("the parent process of the workers ended")

    def _end_all(self, reason: str) -> None:
        for handle in list(self.handles.values()):
            if handle.end is None:
                if handle.pid is not None:
                    linux.kill_group(handle.pid)
                handle.ended(ProcessEnd(None, reason))


def _log_output(handle: WorkerHandle, lines: list[str], dropped_bytes: int) -> None:
    rollout_ids = list(handle.rollouts)
    whose = {"rollout_id": rollout_ids[0]} if len(rollout_ids) == 1 else {}
    for line in lines:
        _log.info("worker_output", worker=handle.id, pid=handle.pid, line=line, **whose)
    if dropped_bytes:
        _log.warning("worker_output_dropped", worker=handle.id, bytes=dropped_bytes, **whose)
