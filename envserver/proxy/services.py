"""Handles an attempt's calls to its environment's services and its requests for sandboxes.

Both are limited and stopped with the attempt. Services take and return JSON objects, sandboxes
MessagePack. A failure that is not the agent's fault is recorded before the agent sees it, since the
agent may hide it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import orjson
import structlog
from envserver_records.errors import (
    LimitReached,
    NotFoundError,
    SandboxError,
    SandboxUnavailable,
    ServiceError,
    UsageError,
)
from envserver_records.records import SandboxUsage, ServiceCall

from ..environment import Caller, Service, Services
from ..tools.calling import may_be_bug, place_of
from ..tools.mcp_client import SHARED_PREFIX
from .asgi import (
    Interrupted,
    Interrupts,
    Receive,
    Scope,
    Send,
    parse_object,
    read_body,
    retrieve,
    send_bytes,
)
from .attempts import ProxyAttempt, ended

SETTLE_SECONDS = 10.0
"""Seconds for the requests of an ended attempt to stop and for its state to be left."""


class AttemptState:
    """What a service keeps for one attempt: what `make` returns, or the value of that context."""

    def __init__(self, make: Callable[[], Any], rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._opened.add_done_callback(retrieve)
        self._users = 0
        self._sealed = False
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._own(make))

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Any]:
        """Yields the state, which stays open within the block; raises what making it raised."""
        self._users += 1
        try:
            yield await asyncio.shield(self._opened)
        finally:
            self._users -= 1
            self._changed.set()

    def seal(self) -> None:
        """Leaves the state as soon as no request uses it."""
        self._sealed = True
        self._changed.set()

    async def settle(self) -> None:
        """Waits, for a bounded time, until a sealed state is left."""
        _, late = await asyncio.wait({self._task}, timeout=SETTLE_SECONDS)
        if late:
            _log.error("service_state_does_not_end", rollout_id=self._rollout_id)
            self._task.cancel()

    async def _own(self, make: Callable[[], Any]) -> None:
        try:
            made = make()
            is_context = isinstance(made, AbstractAsyncContextManager)
            async with made if is_context else nullcontext(made) as state:
                self._opened.set_result(state)
                while not self._sealed or self._users:
                    self._changed.clear()
                    await self._changed.wait()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of the environment's code
            if self._opened.done():
                _log.exception("service_state_failed", rollout_id=self._rollout_id)
            else:
                self._opened.set_exception(error)


TOOLS_PREFIX = "tools/"
MOST_CALLS = 2000
_AT_A_TIME = 8
"""Calls of one attempt at the same time; further ones wait."""
_MOST_BODY_BYTES = 1 << 20
_MOST_ANSWER_BYTES = 16 << 20
_MOST_FLAGS = 16

_log = structlog.get_logger("envserver.services")


class ServiceRouter:
    def __init__(self, services: Mapping[str, Service]) -> None:
        self._services = services
        self._failed: set[str] = set()
        self._known = services if isinstance(services, Services) else Services(services)
        self._places: WeakKeyDictionary[ProxyAttempt, asyncio.Semaphore] = WeakKeyDictionary()
        self._states: WeakKeyDictionary[ProxyAttempt, AttemptState] = WeakKeyDictionary()

    def counts(self) -> Mapping[str, float]:
        return self._known.counts()

    async def shown(self, group_id: str) -> dict[str, Any]:
        shown = self._known.shown(group_id)
        return await shown if inspect.isawaitable(shown) else shown

    def seal(self, attempt: ProxyAttempt) -> None:
        if (state := self._states.get(attempt)) is not None:
            state.seal()

    async def settle(self, attempt: ProxyAttempt) -> None:
        if (state := self._states.get(attempt)) is not None:
            await state.settle()

    async def close(self) -> None:
        states = list(self._states.values())
        for state in states:
            state.seal()
        await asyncio.gather(*(state.settle() for state in states))

    async def answer(
        self, attempt: ProxyAttempt, name: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        service = self._services.get(name)
        if service is None:
            known = ", ".join(self._services) or "none"
            raise NotFoundError(f"There is no service {name[:80]!r}. Known services: {known}.")
        body = await read_body(scope, receive, _MOST_BODY_BYTES)
        with attempt.in_flight.reading():
            arguments = parse_object(body)
        if attempt.sealed:
            raise ended()
        attempt.check_time()
        attempt.service_calls += 1
        if attempt.service_calls > MOST_CALLS:
            raise attempt.reached("turns", f"All {MOST_CALLS} tool calls are used up.")
        # The worker times the tools of shared MCP servers, whose names only it knows.
        is_timed = not name.startswith(SHARED_PREFIX)
        try:
            with attempt.timeline.timed("tool", name) if is_timed else nullcontext():
                run = self._run(attempt, name, service, arguments)
                body = await _while_wanted(attempt, receive, attempt.seconds_left, run)
        except ServiceError as error:
            attempt.service_failed(error)
            raise
        except UsageError as error:
            _keep(attempt, name, arguments, refused=error.message)
            raise
        _keep(attempt, name, arguments, body)
        await send_bytes(send, 200, body, b"application/json")

    async def _run(
        self, attempt: ProxyAttempt, name: str, service: Service, arguments: dict[str, Any]
    ) -> bytes:
        places = self._places.setdefault(attempt, asyncio.Semaphore(_AT_A_TIME))
        async with places:
            try:
                async with self.caller(attempt) as caller:
                    body = orjson.dumps(await service(arguments, caller))
            except (UsageError, LimitReached, ServiceError):
                raise
            except (Exception, SystemExit) as error:
                # The message may hold addresses and keys: it goes to the log only.
                what = f"{type(error).__name__} {place_of(error, service)}"
                failed = f"The service {name!r} failed: {what}"
                is_new = failed not in self._failed
                self._failed.add(failed)
                _log.error(
                    "service_failed",
                    rollout_id=attempt.spec.rollout_id,
                    service=name,
                    error=str(error),
                    exc_info=is_new,
                )
                said = f"{hash(str(error)):x}"
                raise ServiceError(failed, place="", said=said, **may_be_bug(error)) from error
        if len(body) > _MOST_ANSWER_BYTES:
            raise ServiceError(f"The answer of {name!r} is over {_MOST_ANSWER_BYTES} bytes.")
        return body

    @asynccontextmanager
    async def caller(self, attempt: ProxyAttempt) -> AsyncIterator[Caller]:
        """Yields what the environment's code sees of the attempt, with its state open."""
        spec = attempt.spec
        async with self._state(attempt) as state:
            yield Caller(
                rollout_id=spec.rollout_id,
                group_id=spec.group_id,
                task=spec.task,
                flag=lambda word: _flag(attempt, word),
                state=state,
            )

    def _state(self, attempt: ProxyAttempt) -> AbstractAsyncContextManager[Any]:
        make = self._known.state
        if make is None:
            return nullcontext()
        state = self._states.get(attempt)
        if state is None:
            if attempt.sealed:
                raise ended()
            task = attempt.spec.task
            state = AttemptState(lambda: make(task), attempt.spec.rollout_id)
            self._states[attempt] = state
        return state.used()


def _keep(
    attempt: ProxyAttempt,
    name: str,
    arguments: dict[str, Any],
    body: bytes = b"null",
    refused: str = "",
) -> None:
    if attempt.spec.keep_services and not attempt.sealed:
        answer = orjson.loads(body)
        with attempt.recording():
            attempt.recorded.hold(arguments, answer)
        attempt.asked_services.append(
            ServiceCall(name=name, arguments=arguments, answer=answer, refused=refused)
        )


async def _while_wanted(
    attempt: ProxyAttempt, receive: Receive, seconds: float, work: Coroutine[Any, Any, bytes]
) -> bytes:
    """Runs `work` while the client waits, the attempt runs and time is left."""
    interrupts = Interrupts(receive, max(0.0, seconds))
    try:
        with attempt.working(interrupts):
            async with interrupts:
                return await work
    except Interrupted as interrupted:
        if interrupted.reason == "sealed":
            raise ended() from None
        if interrupted.reason == "time":
            raise attempt.reached("time", "The time of this rollout is used up.") from None
        raise


def _flag(attempt: ProxyAttempt, word: str) -> None:
    if len(attempt.flags) < _MOST_FLAGS:
        attempt.flags.add(word)


PREFIX = "sandbox/"
_LAST_SECONDS = 5.0
"""Time after the deadline in which an attempt may still close its sandboxes."""


class SandboxHost(Protocol):
    """Owns the sandboxes of all running attempts."""

    @property
    def open(self) -> int: ...

    def most_bytes(self, path: str) -> int: ...

    async def answer(self, attempt: ProxyAttempt, path: str, body: bytes) -> bytes:
        """Carries out one request; cancelling it cancels what it started."""

    def seal(self, attempt: ProxyAttempt) -> None: ...

    async def settle(self, attempt: ProxyAttempt) -> SandboxUsage | None:
        """Waits, after `seal`, until all is gone; returns the usage, None without a sandbox."""


async def answer_about_sandboxes(
    host: SandboxHost | None,
    attempt: ProxyAttempt,
    path: str,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    if host is None:
        bug = "A bug in the environment: it opens a sandbox and declares none."
        hint = "Set Environment.sandbox."
        none = SandboxUnavailable(
            "This environment declares no sandbox.", hint=hint, bug=f"{bug} {hint}", missing="yes"
        )
        attempt.sandbox_failed(none)
        raise none
    body = await read_body(scope, receive, host.most_bytes(path))
    if attempt.sealed:
        raise ended()
    seconds = max(0.0, attempt.seconds_left) + _LAST_SECONDS
    try:
        answer = await _while_wanted(attempt, receive, seconds, host.answer(attempt, path, body))
    except SandboxError as error:
        attempt.sandbox_failed(error)
        raise
    await send_bytes(send, 200, answer, b"application/msgpack")
