"""A scorer process as the server sees it: requests go in, one at a time, and answers come out.

Both are frames (`envserver_records.framing`) on a socket between the two, which begin with the
number of the request; answer 0 says that the process has loaded its environment. What always holds:
an answer is that of its request; a request that is cancelled, or over its time, ends the process,
and so does anything else that comes from it; a process that has ended answers nothing more.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, popen_forkserver, reduction, resource_tracker, util
from multiprocessing.context import (
    BaseContext,
    ForkServerContext,
    ForkServerProcess,
    set_spawning_popen,
)
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from envserver_records.errors import ConfigError
from envserver_records.framing import FrameReader, frame

from ..registry.interpreters import (
    SETTINGS,
    InterpreterContext,
    interpreter_of,
    preparation,
    start_method_stays,
)
from ..sandbox.places import folder_for_sockets
from . import scorer_process

KILL_GRACE_SECONDS = 5.0
"""Seconds for the process to end all that it started."""
_END = signal.SIGTERM, signal.SIGCONT  # it may be stopped


class ScorerEnded(Exception):
    """The process ended before its answer.

    Args:
        began: whether it had read the request.
        garbled: it was ended because it sent something else than its answer.
    """

    def __init__(self, *, began: bool, garbled: bool = False) -> None:
        super().__init__("The scorer process has ended.")
        self.began = began
        self.garbled = garbled


class ScorerChannel(asyncio.Protocol):
    """A process that runs `scorer_process.serve`; made by `started`."""

    def __init__(self, process: BaseProcess, pidfd: int, channel: socket.socket) -> None:
        self._process = process
        self._pidfd = pidfd
        self._frames = FrameReader()
        self._loop = asyncio.get_running_loop()
        # None: it has ended. Not its error, whose traceback holds this object, and so its pipes.
        self._answer: asyncio.Future[bytes | None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._number = 0
        self._ends = False
        self._began = False
        self._garbled = False
        # Also at the end of Python, which else waits for the process as that one for a request.
        util.Finalize(self, _end_and_close, (pidfd,), exitpriority=10)
        self._channel = channel

    @classmethod
    async def started(cls, context: BaseContext, arguments: tuple[Any, ...]) -> ScorerChannel:
        """Starts a process; `loaded` waits for it.

        Args:
            arguments: of `scorer_process.load`.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.to_thread(_start, context, theirs, arguments)
            channel = cls(process, os.pidfd_open(cast(int, process.pid)), ours)
            await channel._loop.create_unix_connection(lambda: channel, sock=ours)
        except BaseException as error:
            ours.close()  # which ends the process
            if isinstance(error, OSError | EOFError):
                raise ScorerEnded(began=False) from error
            raise
        return channel

    async def loaded(self) -> None:
        """Waits until the process has loaded its environment; raises like `ask`."""
        await self._answered()

    @property
    def usable(self) -> bool:
        """Whether it takes requests, as far as is known."""
        return not (self._ends or self._lost.is_set())

    async def ask(self, request: bytes) -> bytes:
        """Returns the answer to `request`; cancelling it ends the process."""
        self._answer = self._loop.create_future()
        if self._transport is None or not self.usable:
            raise ScorerEnded(began=False)
        self._number += 1
        self._transport.write(frame(self._prefix() + request))
        return await self._answered()

    def _prefix(self) -> bytes:
        return self._number.to_bytes(scorer_process.NUMBER_BYTES, "big")

    async def _answered(self) -> bytes:
        try:
            answer = await self._answer
        except asyncio.CancelledError:
            self.end()
            raise
        if answer is None:
            raise ScorerEnded(began=self._began, garbled=self._garbled)
        return answer

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if not self._ends:
            self._ends = True
            _signal(self._pidfd, *_END)
            self._loop.call_later(KILL_GRACE_SECONDS, self._kill)

    def _kill(self) -> None:
        _signal(self._pidfd, signal.SIGKILL)

    async def ended(self) -> int | None:
        """Waits until it has ended; returns its exit code, that of a signal negative."""
        await self._lost.wait()
        await asyncio.to_thread(self._process.join)
        return self._process.exitcode

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        # Its end closes the socket even where a child of it holds the socket open.
        self._loop.add_reader(self._pidfd, self._shut_down)

    def data_received(self, data: bytes) -> None:
        for answer in self._frames.feed(data):
            if self._answer.done() or not answer.startswith(self._prefix()):
                self._garbled = True
                self.end()
            elif not self._ends:
                self._answer.set_result(answer[scorer_process.NUMBER_BYTES :])

    def _shut_down(self) -> None:
        self._loop.remove_reader(self._pidfd)
        with suppress(OSError):  # closed by `started`, which was cancelled
            self._channel.shutdown(socket.SHUT_RDWR)

    def connection_lost(self, exc: Exception | None) -> None:
        self._loop.remove_reader(self._pidfd)
        self._lost.set()
        self.end()  # it may have closed its socket alone
        if not self._answer.done():
            # The kernel tells apart an end with bytes of the request unread.
            self._began = self._garbled or not isinstance(exc, ConnectionError)
            self._answer.set_result(None)


def _start(context: BaseContext, channel: socket.socket, arguments: tuple[Any, ...]) -> BaseProcess:
    with channel:
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # not in typeshed
            target=scorer_process.serve, args=(channel, arguments), name="scorer"
        )
        process.start()
    return process


def _end_and_close(pidfd: int) -> None:
    _signal(pidfd, *_END)
    os.close(pidfd)


def _signal(pidfd: int, *numbers: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        for number in numbers:
            signal.pidfd_send_signal(pidfd, number)


# Multiprocessing's own forkserver, start method and preloaded modules stay the caller's.


class _Popen(popen_forkserver.Popen):
    """Starts one process; differs from its base class in the forkserver, and in `preparation`."""

    _fds: list[int]

    def _launch(self, process_obj: BaseProcess) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, pipe = _server.connect_to_new_process(self._fds)
        # By its end of this pipe the process sees that this one has ended.
        kept = os.dup(pipe)
        self.finalizer = util.Finalize(self, _close, (kept, self.sentinel))
        with os.fdopen(pipe, "wb") as file:
            file.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _ScorerProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # multiprocessing's name
        return _Popen(process_obj)


class _ScorerContext(ForkServerContext):
    Process = _ScorerProcess


def scorer_context(env_reference: str) -> BaseContext:
    """Returns the context that starts the scorers of an environment, in its interpreter.

    Not by forking the server: it has threads, and scorers must not see its memory.
    Raises ConfigError: no socket can be made anywhere.
    """
    if (own := interpreter_of(env_reference)) is not None:
        return InterpreterContext(own)
    _start_forkserver()
    return _ScorerContext()


def check_working_directory() -> None:
    """Raises ConfigError if the working directory is gone: no process can be started then."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "The working directory of this process has been removed.",
            hint="Change to a folder that exists.",
        ) from None


def _forget_forkserver() -> None:
    """Takes another forkserver: a process that was forked cannot use that of its parent."""
    global _server
    _server = _own_forkserver()


def _own_forkserver() -> forkserver.ForkServer:
    own = forkserver.ForkServer()
    own.set_forkserver_preload([scorer_process.__name__])
    return own


_server = _own_forkserver()
os.register_at_fork(after_in_child=_forget_forkserver)


def _start_forkserver() -> None:
    """Starts the process that scorers are forked from, protected from Ctrl-C.

    A terminal sends Ctrl-C to all processes; the server decides how they react.
    """
    _place_its_socket()
    # First multiprocessing's helper: starting it unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _without_settings(), start_method_stays():
            _server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_settings() -> Iterator[None]:
    """Hides the server's own variables, its keys among them, from a process that starts within."""
    ours = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(SETTINGS)}
    try:
        yield
    finally:
        os.environ.update(ours)


def _place_its_socket() -> None:
    """Makes multiprocessing choose its folder once, early, where a socket's path fits."""
    usual = tempfile.tempdir
    tempfile.tempdir = folder_for_sockets()
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
