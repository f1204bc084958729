"""A sandbox on another machine; see `sandbox_interface.Sandbox`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import EnvserverError, InputError, SandboxLost, SandboxUnavailable
from envserver_records.records import ExecResult, SandboxLimits, SandboxSpec, SandboxUsage

from ...proxy.egress import OnConnection
from ..maker import StartedProgram
from ..requests import Exec, Read, Received, RunPython, Send, Write
from ..wire import MAX_FRAME_BYTES
from .link import FramedLink
from .messages import Answer, Opened, Problem, StartProgram, error_of, framed
from .outside import Arrivals, socket_pair

_GRACE_SECONDS = 10.0
_PIECE_BYTES = 1 << 16

T = TypeVar("T")


class MachineGone(SandboxUnavailable):
    """The machine did not answer, and has made no sandbox."""


class MachineSandbox:
    """A sandbox at the other end of `websocket`; see `maker.TalkingSandbox`.

    Args:
        url: of its machine.
        on_lost: is called with the reason if the machine is lost with the sandbox.
    """

    _names = itertools.count(1)

    def __init__(
        self,
        websocket: aiohttp.ClientWebSocketResponse,
        url: str,
        on_lost: Callable[[str], None],
    ) -> None:
        self.id = f"remote-{next(self._names)}"
        self.isolation = ""
        self.url = url
        self._websocket = websocket
        self._on_lost = on_lost
        self._link = FramedLink(_ClientLink(websocket), MAX_FRAME_BYTES)
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[tuple[str, msgspec.Raw]]] = {}
        self._limits = SandboxLimits()
        self._lost: SandboxLost | None = None
        self._closed = False
        self._reading = asyncio.create_task(self._read_answers(), name="remote-sandbox")

    async def set_up(self, spec: SandboxSpec) -> Opened:
        """Waits until the machine has made the sandbox."""
        self._limits = spec.limits
        try:
            opened = await self._ask("open", spec, Opened)
        except SandboxLost as error:
            raise MachineGone(error.message) from error
        self.isolation = opened.isolation
        return opened

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        if not argv:
            raise InputError("An empty command cannot be run.")
        self._check_input(stdin)
        variables = None if env is None else dict(env)
        body = Exec(argv=list(argv), stdin=stdin, cwd=cwd, env=variables, limits=limits)
        return await self._ask("exec", body, ExecResult)

    async def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        self._check_input(stdin)
        body = RunPython(code=code, argv=list(argv), stdin=stdin, cwd=cwd, limits=limits)
        return await self._ask("python", body, ExecResult)

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        data = await self._ask("read", Read(path=path, max_bytes=max_bytes), bytes)
        if len(data) > max_bytes:
            raise self._lose("it sent more than was asked for")
        return data

    async def write(self, path: str, data: bytes) -> None:
        await self._ask("write", Write(path=path, data=data), type(None))

    async def total(self) -> SandboxUsage:
        return await self._ask("total", None, SandboxUsage)

    async def lead_out(self, serve: OnConnection) -> Arrivals | None:
        if not await self._ask("lead_out", None, bool):
            return None
        return Arrivals(self._ask, serve)

    @asynccontextmanager
    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], wall_seconds: float
    ) -> AsyncIterator[StartedProgram]:
        body = StartProgram(argv=list(argv), env=dict(env), wall_seconds=wall_seconds)
        await self._ask("start", body, type(None))
        stdio, ours = socket_pair()
        program = StartedProgram(stdio)
        pumping = (
            asyncio.create_task(self._pass_input(ours)),
            asyncio.create_task(self._pass_output(ours)),
        )
        try:
            yield program
        finally:
            stdio.close()
            await cancel_and_wait(*pumping)
            ours.close()
            program.result = await self._ask("ended", None, ExecResult)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lost is None:
            with contextlib.suppress(EnvserverError, TimeoutError):
                async with asyncio.timeout(_GRACE_SECONDS):
                    await self._asked("close", None, type(None))
        await cancel_and_wait(self._reading)
        await self._websocket.close()

    def _check_input(self, stdin: bytes) -> None:
        if len(stdin) > self._limits.input_kb * 1024:
            raise InputError(f"The input has {len(stdin)} bytes, over {self._limits.input_kb} KB.")

    async def _pass_input(self, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(EnvserverError, OSError):
            while data := await loop.sock_recv(ours, _PIECE_BYTES):
                await self._ask("send", Send(data=data), type(None))

    async def _pass_output(self, ours: socket.socket) -> None:
        """Hands on output until the program has ended, or is lost."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(EnvserverError, OSError):
            while data := (await self._ask("receive", None, Received)).data:
                await loop.sock_sendall(ours, data)
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)

    # Requests and answers

    async def _ask(self, word: str, body: object, kind: type[T]) -> T:
        """Sends one request and returns its answer.

        A cancelled request is cancelled on the machine, and its end waited for.
        """
        if self._closed:
            raise SandboxLost("The sandbox is closed.")
        return await self._asked(word, body, kind)

    async def _asked(self, word: str, body: object, kind: type[T]) -> T:
        number = next(self._numbers)
        frame = framed(number, word, body)
        if self._lost is not None:
            raise self._lost
        answer: asyncio.Future[tuple[str, msgspec.Raw]]
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(frame)
            told, raw = await asyncio.shield(answer)
        except asyncio.CancelledError:
            await self._give_up(number, answer)
            raise
        finally:
            self._answers.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # mark as retrieved
        return self._value(told, raw, kind)

    async def _send(self, frame: bytes) -> None:
        try:
            await self._link.send(frame)
        except ConnectionError as error:
            raise self._lose(str(error) or "the connection broke") from error

    async def _give_up(self, number: int, answer: asyncio.Future[tuple[str, msgspec.Raw]]) -> None:
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._send(framed(next(self._numbers), "cancel", number))
                await asyncio.shield(answer)
        except SandboxLost:
            return
        except (TimeoutError, asyncio.CancelledError):  # nobody waits for the program's end
            self._lose("it ignored a cancel request")

    def _value(self, told: str, raw: msgspec.Raw, kind: type[T]) -> T:
        try:
            if told == "ok":
                return msgspec.msgpack.decode(raw, type=kind)
            problem = msgspec.msgpack.decode(raw, type=Problem)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._lose(f"its answer is not valid: {error}") from error
        raise error_of(problem)

    async def _read_answers(self) -> None:
        reason = "the connection to its machine ended"
        try:
            async for body in self._link.bodies():
                number, told, raw = msgspec.msgpack.decode(body, type=Answer)
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result((told, raw))
        except (ValueError, msgspec.DecodeError) as error:
            reason = f"its machine sent what is not an answer: {error}"
        except asyncio.CancelledError:
            reason = "it was closed"
            raise
        finally:
            self._lose(reason)

    def _lose(self, reason: str) -> SandboxLost:
        """Gives the sandbox up after a broken exchange; returns the error for its users."""
        if self._lost is None:
            self._lost = SandboxLost(f"The sandbox at {self.url} was lost: {reason}.")
            if not self._closed:
                self._on_lost(reason)
            self._reading.cancel()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._lost)
        return self._lost


class _ClientLink:
    """See `link.Link`."""

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self._websocket = websocket

    async def send(self, piece: bytes) -> None:
        try:
            await self._websocket.send_bytes(piece)
        except (aiohttp.ClientError, RuntimeError) as error:
            raise ConnectionError(str(error) or "the connection is closed") from error

    async def receive(self) -> bytes:
        message = await self._websocket.receive()
        return message.data if message.type is aiohttp.WSMsgType.BINARY else b""
