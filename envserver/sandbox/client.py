"""Sandboxes for asyncio, over the supervisor's socket; implements `sandbox_interface.Sandboxes`.

The supervisor gives a socket to the sandbox itself, and its pidfd: programs, files and answers do
not pass through the supervisor. The connection owns the sandboxes: they die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar, cast

import msgspec
from envserver_records.errors import (
    InputError,
    SandboxImageMissing,
    SandboxLost,
    SandboxUnavailable,
)
from envserver_records.records import ExecResult, SandboxLimits, SandboxSpec

from ..proxy.egress import OnConnection
from ..proxy.egress_rules import MOST_HEAD_BYTES
from .maker import StartedProgram
from .requests import AskedSandbox, Exec, Read, RunPython, Write, check_input, packed
from .wire import (
    MAX_ANSWER_TEXT_BYTES,
    MAX_MESSAGE_BYTES,
    NAMESPACE_BACKENDS,
    Frames,
    encode,
)

T = TypeVar("T")
_Opened = tuple[str, socket.socket, int]
"""The backend, the socket of the sandbox, and its pidfd."""

_GRACE_SECONDS = 10.0
"""Seconds beyond the wall limit until a sandbox that does not answer counts as lost."""
_FILE_SECONDS = 60.0
_CONTAINER_SECONDS = 3600.0
"""A container may wait for its turn to start, and for its image to be pulled."""
_CLOSE_SECONDS = 10.0
_HUNG_UP_SECONDS = 1.0
"""Seconds for a program whose output has ended to end; then it is killed."""


class SandboxClient:
    """One connection to a supervisor's socket; connects when first needed and after a break."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._requests = itertools.count()
        self._opening: dict[int, asyncio.Future[_Opened]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._disconnect("the connection was closed")

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[ConnectedSandbox]:
        isolation, channel, pidfd = await self._request(spec.preload)
        sandbox = ConnectedSandbox(isolation, channel, pidfd)
        try:
            if spec.image and isolation != "docker":
                raise SandboxUnavailable(
                    f"The image of a container needs the backend docker; this one is {isolation}."
                )
            await sandbox.set_up(spec)
            yield sandbox
        finally:
            await asyncio.shield(sandbox.close())

    async def _request(self, preload: tuple[str, ...]) -> _Opened:
        connection = self._connected()
        number = next(self._requests)
        answer: asyncio.Future[_Opened]
        answer = asyncio.get_running_loop().create_future()
        self._opening[number] = answer
        try:
            connection.send(msgspec.msgpack.encode(("open", number, preload)))
            return await answer
        except OSError as error:
            raise SandboxUnavailable(f"The sandboxes' supervisor is gone: {error}") from error
        except asyncio.CancelledError:
            self._give_up(number, answer)
            raise
        finally:
            self._opening.pop(number, None)

    def _give_up(self, number: int, answer: asyncio.Future[_Opened]) -> None:
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            _, channel, pidfd = answer.result()
            channel.close()  # the in-sandbox server then ends
            os.close(pidfd)
        elif self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(msgspec.msgpack.encode(("cancel", number, ())))

    def _connected(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(self._address)
            except OSError as error:
                connection.close()
                raise SandboxUnavailable(f"No supervisor of sandboxes answers: {error}") from error
            connection.setblocking(False)
            asyncio.get_running_loop().add_reader(connection, self._receive)
            self._socket = connection
        return self._socket

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 4)
        except BlockingIOError:
            return
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._disconnect("the sandboxes' supervisor ended")
            return
        word, number, text = msgspec.msgpack.decode(data, type=tuple[str, int, str])
        answer = self._opening.get(number)
        if answer is None or answer.done():
            for descriptor in descriptors:
                os.close(descriptor)
        elif word == "opened":
            answer.set_result((text, socket.socket(fileno=descriptors[0]), descriptors[1]))
        else:
            answer.set_exception(SandboxUnavailable(f"No sandbox could be made: {text}."))

    def _disconnect(self, reason: str) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        for answer in self._opening.values():
            if not answer.done():
                answer.set_exception(SandboxUnavailable(f"No sandbox could be made: {reason}."))


class ConnectedSandbox(AskedSandbox):
    _names = itertools.count(1)

    def __init__(self, isolation: str, channel: socket.socket, pidfd: int) -> None:
        self.id = f"sandbox-{os.getpid()}-{next(self._names)}"
        self.isolation = isolation
        self._channel = channel
        self._channel.setblocking(False)
        self._pidfd = pidfd
        self._frames = Frames(most_text=MAX_ANSWER_TEXT_BYTES)
        self._turn = asyncio.Lock()
        self._limits = SandboxLimits()
        self._closed = False
        self._descriptors: list[int] = []

    async def set_up(self, spec: SandboxSpec) -> None:
        self._limits = spec.limits
        limits = msgspec.structs.asdict(spec.limits)
        request = {**msgspec.structs.asdict(spec), "limits": limits}
        seconds = _CONTAINER_SECONDS if self.isolation == "docker" else _FILE_SECONDS
        await self._ask(seconds, "setup", request)

    async def ask(self, action: str, body: Any, kind: type[T]) -> T:
        check_input(body, self._limits)
        match body:
            case Exec() | RunPython():
                request = {"code": None, "env": None, **msgspec.structs.asdict(body)}
                request["env"] = request["env"] or {}
                if body.limits is not None:
                    request["limits"] = msgspec.structs.asdict(body.limits)
                seconds = (body.limits or self._limits).wall_seconds + _GRACE_SECONDS
                answer = await self._ask(seconds, "run", request)
            case None:
                answer = await self._ask(_FILE_SECONDS, action)
            case _:
                answer = await self._ask(_FILE_SECONDS, action, *msgspec.structs.astuple(body))
        if isinstance(body, Write):
            return cast(T, None)
        checked = self._checked(answer, kind)
        if isinstance(body, Read) and len(cast(bytes, checked)) > body.max_bytes:
            raise self._lost("it sent more than was requested")
        return checked

    async def lead_out(self, serve: OnConnection) -> asyncio.AbstractServer | None:
        if not self._dies_whole:
            return None
        await self._ask(_FILE_SECONDS, "lead_out")
        listener = socket.socket(fileno=self._handed_out())
        return await asyncio.start_server(serve, sock=listener, limit=MOST_HEAD_BYTES)

    @asynccontextmanager
    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], wall_seconds: float
    ) -> AsyncIterator[StartedProgram]:
        if self.isolation == "docker":
            raise SandboxUnavailable("The docker backend does not support interactive programs.")
        request = {"argv": list(argv), "env": dict(env), "wall_seconds": wall_seconds}
        async with self._turn:
            await self._asked(_FILE_SECONDS, "start", request)
            program = StartedProgram(socket.socket(fileno=self._handed_out()))
            try:
                yield program
            finally:
                program.stdio.close()
                ended = asyncio.ensure_future(self._asked(_GRACE_SECONDS, "ended"))
                if program.hung_up:
                    await asyncio.wait({ended}, timeout=_HUNG_UP_SECONDS)
                if not ended.done():
                    await self._send_cancel()
                program.result = self._checked(await ended, ExecResult)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # waiting callers get the error
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL if self._dies_whole else 0)
            await self._gone()
        except ProcessLookupError:
            return
        finally:
            os.close(self._pidfd)
            async with self._turn:
                self._channel.close()
                for descriptor in self._descriptors:
                    os.close(descriptor)

    def _handed_out(self) -> int:
        if not self._descriptors:
            raise self._lost("it handed out no descriptor")
        return self._descriptors.pop()

    @property
    def _dies_whole(self) -> bool:
        """Whether killing the in-sandbox server kills all programs; else it cleans up."""
        return self.isolation in NAMESPACE_BACKENDS

    async def _gone(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await _readable(self._pidfd)
        except TimeoutError:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _ask(self, seconds: float, *request: Any) -> Any:
        """Requests of several tasks take turns; a cancelled one waits for its program's end."""
        async with self._turn:
            return await self._asked(seconds, *request)

    async def _asked(self, seconds: float, *request: Any) -> Any:
        """`_ask` for the task whose turn it is."""
        frame = packed(encode, *request)
        if self._closed:
            raise SandboxLost("The sandbox is closed.")
        try:
            async with asyncio.timeout(seconds):
                exchange = asyncio.ensure_future(self._exchange(frame))
                try:
                    answer = await asyncio.shield(exchange)
                except asyncio.CancelledError:
                    await self._cancel(exchange)
                    raise
        except TimeoutError:
            raise self._lost("it did not answer in time") from None
        except (OSError, ValueError) as error:
            raise self._lost(str(error) or type(error).__name__) from error
        match answer:
            case ["ok", value]:
                return value
            case ["error", "no_image", str() as image, str() as message]:
                raise image_missing(image, message)
            case ["error", "unavailable", str() as message]:
                raise SandboxUnavailable(f"No sandbox could be made: {message}.")
            case ["error", str(), str() as message]:
                raise InputError(f"In the sandbox: {message}.")
        raise self._lost("it sent an unknown answer")

    def _checked(self, answer: object, kind: type[T]) -> T:
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise self._lost(f"its answer is not valid: {error}") from error

    async def _send_cancel(self) -> None:
        with contextlib.suppress(ConnectionError):  # the waiting caller gets the error
            await asyncio.get_running_loop().sock_sendall(self._channel, encode("cancel"))

    async def _cancel(self, exchange: asyncio.Future[list[Any]]) -> None:
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._send_cancel()
                await asyncio.shield(exchange)
        except (TimeoutError, OSError, ValueError):
            exchange.cancel()
            self._lost("it ignored a cancel request")
        except asyncio.CancelledError:  # again: the next request would get its answer
            exchange.cancel()
            self._lost("it was given up")
            raise

    async def _exchange(self, frame: bytes) -> list[Any]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._channel, frame)
        while True:
            data = await self._received()
            if not data:
                raise ConnectionError("it ended")
            frames = self._frames.feed(data)
            if frames:
                return frames[0]

    async def _received(self) -> bytes:
        """Returns what has come next; keeps descriptors that came with it."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._channel, 2**18, 1)
            except BlockingIOError:
                await _readable(self._channel)
                continue
            self._descriptors += descriptors
            return data

    def _lost(self, reason: str) -> SandboxLost:
        """Kills a sandbox after a broken exchange, which cannot be continued."""
        with contextlib.suppress(ProcessLookupError):
            if not self._closed:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return SandboxLost(f"The sandbox was lost: {reason}.")


async def _readable(channel: socket.socket | int) -> None:
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(channel, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(channel)


def image_missing(image: str, reason: str) -> SandboxImageMissing:
    words = f"The container engine lacks an image: {image} ({reason.rstrip('.')})."
    return SandboxImageMissing(
        words,
        hint="Build or pull it, or allow pulling it: --sandbox.docker_pull missing.",
        bug=words,  # each rollout with it fails
        missing=image,
    )
