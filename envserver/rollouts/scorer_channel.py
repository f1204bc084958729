"""A scorer process as the server sees it: requests go in, one at a time, and answers come out.

Both are frames (`envserver_records.framing`) on a socket between the two, which begin with the
number of the request; answer 0 says that the process has loaded its environment. What always holds:
an answer is that of its request; a request that is cancelled, or over its time, ends the process,
and so does anything else that comes from it; a process that has ended answers nothing more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from multiprocessing import util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, cast

from envserver_records.framing import FrameReader, frame

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

        Raises:
            ScorerEnded: it cannot be started, or has ended at once.
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
        """Returns the answer to `request`; cancelling it ends the process.

        Raises:
            ScorerEnded: the process ended, or had ended.
        """
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
        self._loop.add_reader(self._pidfd, self._channel.shutdown, socket.SHUT_RDWR)

    def data_received(self, data: bytes) -> None:
        for answer in self._frames.feed(data):
            if self._answer.done() or not answer.startswith(self._prefix()):
                self._garbled = True
                self.end()
            elif not self._ends:
                self._answer.set_result(answer[scorer_process.NUMBER_BYTES :])

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
