"""The client of sandbox machines: chooses the machine with the most free room for each sandbox.

A process keeps one record of its machines for all its event loops: their last known load, and which
of them do not answer. A load that is older than a second is asked for again before a choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar, cast

import aiohttp
import msgspec
import structlog
from envserver_records.errors import (
    ConfigError,
    EnvserverError,
    SandboxLost,
    SandboxUnavailable,
)
from envserver_records.records import ExecResult, SandboxLimits, SandboxSpec
from envserver_records.waiting import Backoff, cancel_and_wait

from ..proxy.egress import OnConnection
from .machine_messages import (
    PATH,
    PIECE_BYTES,
    PROTOCOL,
    Answer,
    Arrivals,
    FramedLink,
    Load,
    MachineBusy,
    Opened,
    Problem,
    StartProgram,
    error_of,
    framed,
    pump_from,
    pump_to,
    socket_pair,
)
from .maker import RemoteAddress, StartedProgram
from .requests import AskedProgramSandbox, Read, check_input
from .wire import MAX_FRAME_BYTES

_GRACE_SECONDS = 10.0

T = TypeVar("T")


class MachineGone(SandboxUnavailable):
    """The machine did not answer, and has made no sandbox."""


class MachineSandbox(AskedProgramSandbox):
    """A sandbox at the other end of `websocket`, on the machine at `url`.

    `on_lost` is called with the reason if the machine is lost with the sandbox.
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
        self._limits = spec.limits
        try:
            opened = await self.ask("open", spec, Opened)
        except SandboxLost as error:
            raise MachineGone(error.message) from error
        self.isolation = opened.isolation
        return opened

    async def lead_out(self, serve: OnConnection) -> Arrivals | None:
        if not await self.ask("lead_out", None, bool):
            return None
        return Arrivals(self.ask, serve)

    @asynccontextmanager
    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], wall_seconds: float
    ) -> AsyncIterator[StartedProgram]:
        body = StartProgram(argv=list(argv), env=dict(env), wall_seconds=wall_seconds)
        await self.ask("start", body, type(None))
        stdio, ours = socket_pair()
        program = StartedProgram(stdio)
        pumping = (
            asyncio.create_task(pump_from(ours, self.send)),
            asyncio.create_task(pump_to(ours, self.receive)),
        )
        try:
            yield program
        finally:
            stdio.close()
            await cancel_and_wait(*pumping)
            ours.close()
            program.result = await self.ask("ended", None, ExecResult)

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

    # Requests and answers

    async def ask(self, action: str, body: object, kind: type[T]) -> T:
        """A cancelled request is cancelled on the machine, and its end waited for."""
        check_input(body, self._limits)
        if self._closed:
            raise SandboxLost("The sandbox is closed.")
        answer = await self._asked(action, body, kind)
        if isinstance(body, Read) and len(cast(bytes, answer)) > body.max_bytes:
            raise self._lose("it sent more than was requested")
        return answer

    async def _asked(self, action: str, body: object, kind: type[T]) -> T:
        number = next(self._numbers)
        frame = framed(number, action, body)
        if self._lost is not None:
            raise self._lost
        answer: asyncio.Future[tuple[str, msgspec.Raw]]
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(frame)
            status, raw = await asyncio.shield(answer)
        except asyncio.CancelledError:
            await self._give_up(number, answer)
            raise
        finally:
            self._answers.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # mark as retrieved
        return self._value(status, raw, kind)

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
        except (TimeoutError, asyncio.CancelledError):  # no caller waits for the program's end
            self._lose("it ignored a cancel request")

    def _value(self, status: str, raw: msgspec.Raw, kind: type[T]) -> T:
        try:
            if status == "ok":
                return msgspec.msgpack.decode(raw, type=kind)
            problem = msgspec.msgpack.decode(raw, type=Problem)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._lose(f"its answer is not valid: {error}") from error
        raise error_of(problem)

    async def _read_answers(self) -> None:
        reason = "the connection to its machine ended"
        try:
            async for body in self._link.bodies():
                number, status, raw = msgspec.msgpack.decode(body, type=Answer)
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result((status, raw))
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


_FRESH_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
_LOAD_SECONDS = 3.0
_SET_ASIDE = Backoff(first_seconds=1.0, max_seconds=20.0, jitter=(0.5, 1.0))
_PAUSE = Backoff(first_seconds=0.2, max_seconds=2.0, jitter=(0.5, 1.0))
PATIENCE_SECONDS = 30.0
"""Seconds for which a sandbox is tried again while no machine can make it."""

_log = structlog.get_logger("envserver.sandbox")


class Machine:
    def __init__(self, url: str) -> None:
        self.url = url
        self.load: Load | None = None
        self.problem = ""
        """Why it does not answer; "" if it does."""
        self.open = 0
        """Sandboxes of this process there, with those that are wanted."""
        self.counts: Counter[str] = Counter()
        """Sandboxes that were "opened" there, and machines that were "unreachable" or "lost"."""
        self._seen_at = -_FRESH_SECONDS
        self._open_when_seen = 0
        self._failures = 0
        self._aside_until = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether its load need not be requested."""
        now = time.monotonic()
        return now - self._seen_at < _FRESH_SECONDS or now < self._aside_until

    @property
    def is_aside(self) -> bool:
        return time.monotonic() < self._aside_until

    def answered(self, load: Load) -> None:
        if self.problem:
            _log.info("sandbox_machine_is_back", machine=self.url)
        self.load, self.problem, self._failures = load, "", 0
        self._seen_at, self._aside_until = time.monotonic(), 0.0
        self._open_when_seen = self.open

    def failed(self, reason: str, count: str = "unreachable") -> None:
        self.counts[count] += 1
        if not self.problem:
            _log.warning("sandbox_machine_does_not_answer", machine=self.url, reason=reason)
        self.problem = reason
        self._failures += 1
        seconds = _SET_ASIDE.seconds(self._failures, random.random())
        self._aside_until = time.monotonic() + seconds

    @property
    def fullness(self) -> float:
        """Sandboxes that it has or is to make, per place. Over 1: some wait."""
        if self.load is None:
            return 0.0
        new = max(0, self.open - self._open_when_seen)
        return (self.load.open + self.load.waiting + new) / max(1, self.load.sandboxes)


@functools.cache
def machines_at(urls: tuple[str, ...]) -> tuple[Machine, ...]:
    return tuple(Machine(url) for url in urls)


class Machines:
    """Makes sandboxes on other machines; see `maker.SandboxMaker`."""

    def __init__(self, address: RemoteAddress) -> None:
        self._address = address
        self.known = machines_at(address.urls)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        tls = self._address.tls()
        token = self._address.token
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls),
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[MachineSandbox]:
        """A machine that cannot make it leaves that to another one; what has begun on a machine
        stays there."""
        machine, sandbox = await self._made(spec)
        try:
            yield sandbox
        finally:
            machine.open -= 1
            await asyncio.shield(sandbox.close())

    async def _made(self, spec: SandboxSpec) -> tuple[Machine, MachineSandbox]:
        until = time.monotonic() + PATIENCE_SECONDS
        tried = 0
        while True:
            reasons = {}
            for machine in await self._in_order():
                try:
                    return machine, await self._made_on(machine, spec)
                except (MachineGone, MachineBusy) as error:
                    reasons[machine.url] = error.message
            tried += 1
            pause = _PAUSE.seconds(tried, random.random())
            if time.monotonic() + pause > until:
                reasons |= {known.url: known.problem for known in self.known if known.problem}
                problems = "; ".join(f"{url}: {why}" for url, why in reasons.items())
                raise SandboxUnavailable(f"No sandbox machine can make a sandbox. {problems}")
            await asyncio.sleep(pause)

    async def _made_on(self, machine: Machine, spec: SandboxSpec) -> MachineSandbox:
        assert self._session is not None
        machine.open += 1
        try:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    socket = await self._session.ws_connect(
                        machine.url + PATH, max_msg_size=2 * PIECE_BYTES, heartbeat=20.0
                    )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                machine.failed(_reason(error))
                raise MachineGone(_reason(error)) from error
            sandbox = MachineSandbox(
                socket, machine.url, lambda reason: machine.failed(reason, "lost")
            )
            try:
                opened = await sandbox.set_up(spec)
            except BaseException:
                await asyncio.shield(sandbox.close())
                raise
        except BaseException:
            machine.open -= 1
            raise
        machine.counts["opened"] += 1
        machine.answered(opened.load)
        return sandbox

    async def _in_order(self) -> Sequence[Machine]:
        await self.look()
        able = [
            machine
            for machine in self.known
            if not machine.is_aside and (machine.load is None or not machine.load.draining)
        ]
        return sorted(able, key=lambda machine: (machine.fullness, random.random()))

    async def look(self) -> None:
        """Asks machines for their load where it is not known."""
        await asyncio.gather(*(self._look(each) for each in self.known if not each.is_fresh))

    async def _look(self, machine: Machine) -> None:
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(_LOAD_SECONDS),
                self._session.get(machine.url + PATH) as answer,
            ):
                body = await answer.read()
                if answer.status != 200:
                    machine.failed(_refusal(answer.status, body))
                    return
            load = msgspec.json.decode(body, type=Load)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            machine.failed(_reason(error))
        except msgspec.DecodeError:
            machine.failed("it is not a sandbox machine")
        else:
            if load.protocol == PROTOCOL:
                machine.answered(load)
            else:
                machine.failed("it runs another version of envserver")

    async def check(self) -> None:
        """Raises ConfigError if no machine answers."""
        await self.look()
        if all(machine.problem for machine in self.known):
            problems = "; ".join(f"{machine.url}: {machine.problem}" for machine in self.known)
            raise ConfigError(
                f"No sandbox machine answers. {problems}.",
                hint="Start one: envserver sandboxes serve. Is the token right?",
            )

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_FRESH_SECONDS)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.WSServerHandshakeError):
        return _refusal(error.status, b"")
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached: {error.os_error.strerror or error.os_error}"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return str(error) or type(error).__name__


def _refusal(status: int, body: bytes) -> str:
    match status:
        case 401 | 403:
            return "it refuses the access token (its role must be `environment`)"
        case 404:
            return "it is not a sandbox machine"
    try:
        words: Any = msgspec.json.decode(body)["detail"]
    except (msgspec.DecodeError, KeyError, TypeError):
        words = ""
    return f"HTTP {status} {words}".strip()
