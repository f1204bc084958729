"""A machine that makes sandboxes for remote clients: each connection is one sandbox.

Invariants: at most `sandboxes` are open, and at most `room` programs run; further requests wait in
order; a sandbox ends with its link; a client names no sandbox, so it cannot name another's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
import structlog
from envserver_records.errors import EnvserverError, InputError
from envserver_records.records import ExecResult, SandboxLimits, SandboxSpec

from .machine_messages import (
    BODIES,
    FramedLink,
    Link,
    Load,
    MachineBusy,
    Opened,
    Outside,
    Problem,
    Request,
    framed,
    problem_of,
)
from .maker import SandboxMaker
from .requests import cut_down, plain, variables
from .served import ServedSandbox, decoded
from .wire import MAX_FRAME_BYTES

_OPEN_SECONDS = 60.0
"""Seconds for the first frame of a connection."""
_MOST_WAITING = 1024
_MOST_REQUESTS = 128
"""Maximum requests of one connection that are not answered; an honest client has a few."""
_MOST_HELD = 2
"""Largest requests of one connection for which there is memory; it is read no further then."""
_MOST_WAITING_BYTES = 1 << 30
"""Maximum size of the files for sandboxes that wait for a place, unless only one waits."""
_MOST_PRELOADED = 32
_MOST = {"output_kb": 32 << 10, "input_kb": 64 << 10, "open_files": 1 << 16, "inodes": 1 << 20}
"""Maximum limits that are not settings. This process has input and output in memory."""

T = TypeVar("T")

_log = structlog.get_logger("envserver.sandbox")


class SandboxMachine:
    """Serves sandboxes to clients.

    Args:
        maker: open for as long as this object.
        room: maximum programs that run at a time; interactive programs do not count.
        most: maximum limits of a sandbox, by name; a spec above is refused.
    """

    def __init__(
        self,
        maker: SandboxMaker,
        backend: str,
        *,
        sandboxes: int,
        room: int,
        most: Mapping[str, float],
    ) -> None:
        self.maker = maker
        self.backend = backend
        self.most = {**_MOST, **most}
        self.draining = False
        self.ended: Counter[str] = Counter()
        """Programs that have ended: "ok", or by what they were killed."""
        self.cpu_seconds = 0.0
        self._places = _Places(sandboxes)
        self._room = _Places(room)
        self._waiting_bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def load(self) -> Load:
        return Load(
            backend=self.backend,
            sandboxes=self._places.most,
            open=self._places.taken,
            waiting=self._places.waiting,
            room=self._room.most,
            running=self._room.taken,
            queued=self._room.waiting,
            draining=self.draining,
        )

    async def drain(self) -> None:
        """Takes no more sandboxes, and waits until the open ones are closed."""
        self.draining = True
        await self._empty.wait()

    async def converse(self, link: Link) -> None:
        """Serves one connection until its client ends it; its sandbox is then gone."""
        await _Conversation(self, FramedLink(link, MAX_FRAME_BYTES)).live()

    @contextlib.asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """Waits for the place of a sandbox. `size`: bytes that its request keeps in memory."""
        if self.draining:
            raise MachineBusy("This machine is shutting down.")
        waiting = self._places.waiting
        if waiting >= _MOST_WAITING or (waiting and self._waiting_bytes > _MOST_WAITING_BYTES):
            raise MachineBusy(f"{waiting} requests wait for a sandbox of this machine.")
        async with contextlib.AsyncExitStack() as stack:
            self._waiting_bytes += size
            try:
                await stack.enter_async_context(self._places.hold())
            finally:
                self._waiting_bytes -= size
            self._empty.clear()
            try:
                yield
            finally:
                if self._places.taken == 1:
                    self._empty.set()

    async def run(self, execution: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
        async with self._room.hold():
            result = await execution()
        self.ended[result.killed_by or "ok"] += 1
        self.cpu_seconds += result.usage.cpu_seconds
        return result


class _Places:
    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self.waiting = 0
        self._free = asyncio.Semaphore(most)

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._free.release()


class _Conversation:
    def __init__(self, machine: SandboxMachine, link: FramedLink) -> None:
        self._machine = machine
        self._link = link
        self._served: ServedSandbox | None = None
        self._outside = Outside()
        self._work: dict[int, asyncio.Task[None]] = {}
        self._held = 0
        self._most_held = 0
        self._answered = asyncio.Event()
        self._over = asyncio.Event()
        self._closing: int | None = None
        """Number of the request to close, which is answered when all is gone."""

    async def live(self) -> None:
        requests = self._requests()
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                first = await anext(requests, None)
            if first is None:
                return
            holding = asyncio.create_task(self._hold(*first), name="sandbox")
            listening = asyncio.create_task(self._listen(requests), name="sandbox-requests")
            await asyncio.wait((holding, listening), return_when=asyncio.FIRST_COMPLETED)
            await _ended(listening)
            await _ended(holding)
        except TimeoutError:
            return  # it says nothing
        except ValueError as error:  # it breaks the protocol: there is nothing to answer to
            _log.warning("sandbox_client_refused", reason=str(error))

    async def _requests(self) -> AsyncIterator[tuple[int, str, bytes]]:
        async for body in self._link.bodies():
            try:
                number, word, raw = msgspec.msgpack.decode(body, type=Request)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"a frame that is not a request: {error}") from None
            yield number, word, bytes(raw)

    async def _listen(self, requests: AsyncIterator[tuple[int, str, bytes]]) -> None:
        """Starts what is requested, until the client hangs up; reads no more while the requests
        that are not answered fill the memory of one sandbox."""
        async for number, word, raw in requests:
            if word == "cancel":
                if (work := self._work.get(_number(raw))) is not None and not work.cancelling():
                    work.cancel()
                continue
            if number in self._work or len(self._work) >= _MOST_REQUESTS:
                raise ValueError("too many requests at a time")
            if word == "close":
                self._closing = number
                self._over.set()
                continue
            self._held += len(raw)
            self._work[number] = asyncio.create_task(self._answer(number, word, raw))
            await asyncio.sleep(0)  # a task that is cancelled before it begins answers nothing
            while self._held > self._most_held:
                self._answered.clear()
                await self._answered.wait()

    async def _hold(self, number: int, word: str, raw: bytes) -> None:
        try:
            spec = self._spec(word, raw)
            async with self._machine.place(len(raw)), self._machine.maker.open(spec) as sandbox:
                self._served = ServedSandbox(sandbox, spec.limits)
                self._link.accept_at_most(most := _most_bytes(spec.limits))
                self._most_held = _MOST_HELD * most
                try:
                    await self._say(number, "ok", Opened(sandbox.isolation, self._machine.load))
                    await self._over.wait()
                finally:
                    await self._end_work()
        except Exception as error:  # noqa: BLE001 - the client gets it; ours is logged
            await self._tell(number if self._served is None else self._closing, error)
        else:
            if self._closing is not None:
                await self._say(self._closing, "ok", None)
        finally:
            await self._end_work()

    def _spec(self, word: str, raw: bytes) -> SandboxSpec:
        if word != "open":
            raise InputError("A connection must begin with `open`.")
        spec: SandboxSpec = decoded(word, raw, BODIES)
        limits = cut_down(spec.limits, spec.limits)  # checks them
        for name, most in self._machine.most.items():
            if getattr(limits, name) > most:
                raise InputError(
                    f"This machine allows {name} up to {most:g}, not {getattr(limits, name):g}.",
                    place=name,
                )
        for path in spec.files:
            plain(path)
        variables(spec.env)
        names = [part for module in spec.preload for part in module.split(".")]
        if len(spec.preload) > _MOST_PRELOADED or not all(name.isidentifier() for name in names):
            raise InputError("`preload` must list a few modules.", place="preload")
        return spec

    async def _end_work(self) -> None:
        self._outside.close()
        tasks = list(self._work.values())
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._served is not None:
            await self._served.close()

    async def _answer(self, number: int, word: str, raw: bytes) -> None:
        try:
            value = await self._done(word, raw)
        except asyncio.CancelledError:
            await self._say(number, "error", Problem("cancelled", "The request was cancelled."))
        except Exception as error:  # noqa: BLE001 - the client gets it; ours is logged
            await self._tell(number, error)
        else:
            await self._say(number, "ok", value)
        finally:
            self._work.pop(number, None)
            self._held -= len(raw)
            self._answered.set()

    async def _tell(self, number: int | None, error: Exception) -> None:
        if not isinstance(error, EnvserverError):
            _log.error("sandbox_request_failed", exc_info=error)
        if number is not None:
            await self._say(number, "error", problem_of(error))

    async def _say(self, number: int, word: str, value: object) -> None:
        with contextlib.suppress(ConnectionError):  # the listening task gets the error
            await self._link.send(framed(number, word, value))

    async def _done(self, word: str, raw: bytes) -> Any:
        served = self._served
        if served is None:
            raise InputError("The sandbox is not open yet.")
        body = decoded(word, raw, BODIES)
        match word:
            case "exec" | "python":
                return await self._machine.run(lambda: served.perform(word, body))
            case "start":
                if not body.argv or not body.wall_seconds > 0:
                    raise InputError("A program needs a command, and a time to run.")
                return await served.start(body, body.wall_seconds)
            case "ended":
                return await served.end()
            case "lead_out":
                return await self._outside.lead_out(served.sandbox)
            case "accept":
                return await self._outside.accept()
            case "pass":
                return await self._outside.send(body.number, body.data)
            case "take":
                return await self._outside.receive(body)
        return await served.perform(word, body)


async def _ended(task: asyncio.Task[T]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _number(raw: bytes) -> int:
    try:
        return msgspec.msgpack.decode(raw, type=int)
    except msgspec.DecodeError as error:
        raise ValueError(f"not the number of a request: {error}") from None


def _most_bytes(limits: SandboxLimits) -> int:
    """The size of the largest request that such a sandbox could take."""
    files, inputs = (limits.disk_mb + 1) << 20, (limits.input_kb << 10) + (1 << 20)
    return min(max(files, inputs), MAX_FRAME_BYTES)
