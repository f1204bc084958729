"""Runs services and hooks of an environment in its own interpreter; `HostedServices` asks it.

All requests run at the same time on one event loop. Invariants: one that fails is answered with its
failure and disturbs no other; when the server hangs up, all are cancelled, states are left, and the
process ends.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import msgspec
from envserver_records.errors import EnvserverError, Failure
from envserver_records.records import Task
from envserver_records.waiting import cancel_and_wait

from ..environment import Caller, Environment, Service, Services
from ..rollout_interface import ModelCall
from ..tools.calling import place_of
from ..tools.mcp_client import in_own_task
from ..tools.serving import services_of
from ..tools.watching import watched_loop
from .host import failure_of

HEAD_BYTES = 8
"""Length of a frame, big-endian, before it."""
_MOST_TRACEBACK = 8000


class Request(msgspec.Struct, frozen=True):
    """A request of the server: the name of a method of `_Host`, or "cancel" of an earlier one."""

    number: int
    what: str
    arguments: tuple[Any, ...] = ()


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    message: str
    place: str
    traceback: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    value: bytes = b""
    failure: Failure | None = None
    bug: Bug | None = None
    counts: dict[str, float] = {}
    """What the services have counted by now."""


class Flagged(msgspec.Struct, frozen=True):
    number: int
    word: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the first answer, numbered 0."""

    names: list[str]
    has_state: bool


def ignored(word: str) -> None:
    """Takes the flags of what belongs to no request: a state, a group's end."""


async def receive(reader: asyncio.StreamReader) -> Any:
    """Returns the next message; None at the end."""
    try:
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES))
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(len(data).to_bytes(HEAD_BYTES))
    writer.write(data)


def main(channel: socket.socket, make: Callable[[], Environment]) -> None:
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(_serve(channel, make))


async def _serve(channel: socket.socket, make: Callable[[], Environment]) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    try:
        async with watched_loop(), AsyncExitStack() as stack:
            try:
                environment = make()
                services = await stack.enter_async_context(services_of(environment))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the server shows it
                send(writer, Answer(number=0, failure=failure_of(error)))
                return
            host = _Host(environment, services, writer)
            send(writer, host.offer())
            await host.run(reader)
    finally:
        writer.close()


class _Host:
    """Answers requests. Methods without an underscore are what a request names."""

    def __init__(
        self,
        environment: Environment,
        services: Mapping[str, Service],
        writer: asyncio.StreamWriter,
    ) -> None:
        self._environment = environment
        self._services = services if isinstance(services, Services) else Services(services)
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._states: dict[int, tuple[Any, AsyncExitStack]] = {}
        self._users: dict[int, set[asyncio.Task[Any]]] = {}
        """Tasks that use a state, by its number."""

    def offer(self) -> Answer:
        has_state = self._services.state is not None
        return self._answer(0, Offer(names=list(self._services), has_state=has_state))

    async def run(self, reader: asyncio.StreamReader) -> None:
        try:
            while (request := await receive(reader)) is not None:
                if request.what == "cancel":
                    self._cancel(request.number)
                    continue
                task = asyncio.create_task(self._respond(request))
                self._running[request.number] = task
        finally:
            running = list(self._running.values())
            await cancel_and_wait(*running)
            for number in list(self._states):
                await self.close_state(number, number)

    def _cancel(self, number: int) -> None:
        """Ends a request; leaves the state that it has made if its answer crossed the cancel."""
        if task := self._running.get(number):
            task.cancel()
        elif number in self._states:
            leaving = asyncio.create_task(self.close_state(number, number))
            self._running[number] = leaving
            leaving.add_done_callback(lambda _: self._running.pop(number, None))

    async def _respond(self, request: Request) -> None:
        try:
            value = await getattr(self, request.what)(request.number, *request.arguments)
            answer = self._answer(request.number, value)
        except EnvserverError as error:
            answer = self._answer(request.number, failure=error.failure())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the server tells it
            answer = self._answer(request.number, bug=_bug(error))
        finally:
            del self._running[request.number]
        self._send(answer)

    def _send(self, message: Any) -> None:
        """Sends a message, after those that were sent before; from any thread."""
        self._loop.call_soon_threadsafe(send, self._writer, message)

    def _answer(self, number: int, value: Any = None, **why_not: Any) -> Answer:
        return Answer(
            number=number,
            value=b"" if why_not else pickle.dumps(value),
            counts=dict(self._services.counts()),
            **why_not,
        )

    async def service(
        self, number: int, name: str, arguments: dict[str, Any], caller: Caller
    ) -> Any:
        return await self._services[name](arguments, self._caller(number, caller))

    async def hook(self, number: int, name: str, call: ModelCall) -> Any:
        """Runs a hook; returns the reason, whether it refuses, and what it changes."""
        call.caller = self._caller(number, call.caller)
        waiting = getattr(self._environment, name)(call)
        if waiting is not None:
            await waiting
        return call.reason, call.refused, call.changes

    async def open_state(self, number: int, task: Task) -> int:
        make = self._services.state
        assert make is not None
        stack = AsyncExitStack()
        state = await stack.enter_async_context(in_own_task(lambda: _entered(make(task))))
        self._states[number] = state, stack
        return number

    async def close_state(self, number: int, state: int) -> None:
        """Leaves a state, after the requests that use it."""
        if users := self._users.pop(state, None):
            await asyncio.wait(users)
        _, stack = self._states.pop(state)
        await stack.aclose()

    async def shown(self, number: int, group_id: str) -> dict[str, Any]:
        shown = self._services.shown(group_id)
        return await shown if inspect.isawaitable(shown) else shown

    def _caller(self, number: int, caller: Caller) -> Caller:
        """Returns what a request sees of its rollout; its task is a user of the state, of which
        `caller` has the number."""
        state = None
        if caller.state is not None:
            users = self._users.setdefault(caller.state, set())
            task = self._running[number]
            users.add(task)
            task.add_done_callback(users.discard)
            state = self._states[caller.state][0]
        return replace(
            caller, flag=lambda word: self._send(Flagged(number, str(word))), state=state
        )


@asynccontextmanager
async def _entered(made: Any) -> AsyncIterator[Any]:
    manager: AbstractAsyncContextManager[Any] = (
        made if isinstance(made, AbstractAsyncContextManager) else nullcontext(made)
    )
    async with manager as state:
        yield state


def _bug(error: BaseException) -> Bug:
    return Bug(
        kind=type(error).__name__,
        message=str(error)[:1000],
        place=place_of(error),
        traceback="".join(traceback.format_exception(error))[-_MOST_TRACEBACK:],
    )
