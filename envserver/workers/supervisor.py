"""The server's side of a forkserver: starts it, talks to it, and ends it with all its workers."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
import structlog
from envserver_records.errors import ConfigError, EnvserverError, NotFoundError

from ..registry import interpreter_of
from ..registry.interpreters import PYTHON_VARIABLES
from ..sandbox.places import temporary_folder
from ..sandbox.wire import NAMESPACE_BACKENDS
from . import linux
from .messages import READ_BYTES, Boot
from .output import OutputLimiter

# The kernel ends a forkserver with the thread that started it, so the event loop needs a lasting
# thread.

IMPORT_SECONDS = 300.0
"""Seconds for the environments' imports; some load a machine-learning framework."""
END_SECONDS = 8.0

_log = structlog.get_logger("envserver.workers")

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
