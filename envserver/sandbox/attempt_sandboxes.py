"""The sandboxes of attempts in flight, on the server.

A worker asks over HTTP (`requests`), the proxy identifies the attempt, and each attempt has its own
sandboxes: no other attempt can name them. Model-written code may have taken over a worker, so a
request never gets more than the environment declares. Sandboxes are closed when their attempt is
sealed, and their usage is added up.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import structlog
from envserver_records.errors import EnvserverError, InputError, SandboxLost, SandboxUnavailable
from envserver_records.records import SandboxLimits, SandboxSpec, SandboxUsage

from ..proxy.attempts import ProxyAttempt, ended
from ..proxy.egress import Egress
from .maker import InteractiveSandbox, SandboxMaker, not_lost
from .requests import BODIES, Exec, Open, Opened, RunPython, Start, cut_down, plain, variables
from .served import ServedSandbox, decoded

MOST_PER_ATTEMPT = 8
"""Maximum concurrent sandboxes of one attempt."""
_MOST_BODY_BYTES = 90 << 20
_LAST_SECONDS = 5.0
"""Seconds for a sandbox to report its usage at its end."""
_SETTLE_SECONDS = 30.0
_PEAKS = ("peak_memory_mb", "disk_mb", "peak_processes")

T = TypeVar("T")

_log = structlog.get_logger("envserver.sandbox")


class AttemptSandboxes:
    """The proxy's `SandboxHost`. At the end of the context every sandbox is gone.

    Args:
        sandboxes: stays open for as long as this object.
        most: the environment's own spec: the default and the maximum of an attempt.
        concurrent: maximum sandboxes of all attempts together; further ones wait in order.
        images: whether an attempt may use the image that its task's public part names (`image`).
        egress: carries programs' requests to hosts outside; None: there are none.
    """

    def __init__(
        self,
        sandboxes: SandboxMaker,
        most: SandboxSpec,
        concurrent: int,
        *,
        images: bool = False,
        egress: Egress | None = None,
    ) -> None:
        self._sandboxes = sandboxes
        self._most = most
        self._images = images
        self._egress = egress
        self._places = asyncio.Semaphore(concurrent)
        self._states: WeakKeyDictionary[ProxyAttempt, _AttemptState] = WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        states = list(self._states.values())
        for state in states:
            state.seal()
        if tasks := [task for state in states for task in state.tenants]:
            await asyncio.wait(tasks)

    @property
    def open(self) -> int:
        return sum(len(state.tenants) for state in self._states.values())

    def most_bytes(self, path: str) -> int:
        """The sandbox would refuse anything larger than its disk."""
        limits = self._most.limits
        match path.rpartition("/")[2]:
            case "open" | "write":
                return min((limits.disk_mb + 1) << 20, _MOST_BODY_BYTES)
            case "exec" | "python" | "start" | "send":
                return (limits.input_kb << 10) + (1 << 20)
        return 64 << 10

    async def answer(self, attempt: ProxyAttempt, path: str, body: bytes) -> bytes:
        state = self._states.setdefault(attempt, _AttemptState())
        name, _, action = path.rpartition("/")
        try:
            answer = await self._answer(attempt, state, name, action, body)
        except (EnvserverError, asyncio.CancelledError):
            raise
        except Exception as error:
            _log.exception("sandbox_request_failed", rollout_id=attempt.spec.rollout_id)
            raise SandboxLost(f"The sandbox failed: {type(error).__name__}: {error}") from error
        return msgspec.msgpack.encode(answer)

    def seal(self, attempt: ProxyAttempt) -> None:
        state = self._states.get(attempt)
        if state is None:
            return
        if any(not tenant.opened.done() for tenant in state.open.values()):
            attempt.sandbox_failed(_none_free())
        state.seal()

    async def settle(self, attempt: ProxyAttempt) -> SandboxUsage | None:
        state = self._states.get(attempt)
        if state is None:
            return None
        if state.tenants:
            _, late = await asyncio.wait(state.tenants, timeout=_SETTLE_SECONDS)
            if late:
                rollout_id = attempt.spec.rollout_id
                _log.error("sandboxes_do_not_end", rollout_id=rollout_id, sandboxes=len(late))
        return state.usage

    async def _answer(
        self, attempt: ProxyAttempt, state: _AttemptState, name: str, action: str, body: bytes
    ) -> Any:
        if not name and action == "open":
            return await self._open(attempt, state, decoded(action, body, {"open": Open}))
        tenant = state.open.get(name)
        if tenant is None:
            raise InputError(f"There is no sandbox {name[:40]!r} here, or it is closed.")
        if action == "close":
            del state.open[name]
            return await tenant.close()
        request = decoded(action, body, BODIES)
        if isinstance(request, Exec | RunPython | Start):
            attempt.check_time()
        served = tenant.served
        if isinstance(request, Start):
            return await tenant.perform(served.start(request, attempt.seconds_left))
        performing = served.perform(action, request)
        if not isinstance(request, Exec | RunPython):
            return await tenant.perform(performing)
        program = "python" if isinstance(request, RunPython) else "".join(request.argv[:1])
        with attempt.timeline.timed("sandbox", program):
            return await tenant.perform(not_lost(performing))

    async def _open(self, attempt: ProxyAttempt, state: _AttemptState, wanted: Open) -> Opened:
        spec = self._most if wanted.spec is None else self._allowed(attempt, wanted.spec)
        attempt.check_time()
        if state.sealed:
            raise ended()
        if len(state.open) >= MOST_PER_ATTEMPT:
            raise InputError(f"An attempt may have {MOST_PER_ATTEMPT} sandboxes at a time.")
        tenant = _Tenant(self._opening(attempt, spec), self._most.limits)
        name = state.add(tenant)
        try:
            served = await asyncio.shield(tenant.opened)
        except BaseException as error:
            state.remove(name)
            if isinstance(error, asyncio.CancelledError):
                attempt.sandbox_failed(_none_free())
            raise
        attempt.sandbox_opened()
        return Opened(name, served.sandbox.isolation)

    @asynccontextmanager
    async def _opening(
        self, attempt: ProxyAttempt, spec: SandboxSpec
    ) -> AsyncIterator[InteractiveSandbox]:
        """Opens a sandbox when there is a place, with the way out that the environment has."""
        async with self._places, self._sandboxes.open(spec) as sandbox:
            server = None
            if self._egress is not None:
                server = await self._egress.serve_sandbox(sandbox, attempt)
            try:
                yield sandbox
            finally:
                if server is not None:
                    server.close()

    def _allowed(self, attempt: ProxyAttempt, wanted: SandboxSpec) -> SandboxSpec:
        most = self._most
        if not set(wanted.preload) <= set(most.preload):
            raise InputError(f"Only these modules may be preloaded: {', '.join(most.preload)}.")
        named = attempt.spec.task.public.get("image", "") if self._images else most.image
        if wanted.image not in ("", most.image, named):
            raise InputError("An attempt may only have the image that its task names.")
        for path in wanted.files:
            plain(path)
        return msgspec.structs.replace(
            wanted,
            env=variables(wanted.env),
            # Only the environment's list: each preload list has its own zygote.
            preload=most.preload if wanted.preload else (),
            limits=cut_down(wanted.limits, most.limits),
        )


@dataclass(eq=False)
class _AttemptState:
    """The sandboxes of one attempt.

    Args:
        open: its sandboxes, by the names that the worker uses.
        tenants: the tasks of all sandboxes that are not closed yet.
        usage: usage of the closed ones.
    """

    open: dict[str, _Tenant] = field(default_factory=dict)
    tenants: set[asyncio.Task[SandboxUsage | None]] = field(default_factory=set)
    usage: SandboxUsage | None = None
    sealed: bool = False
    _names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, tenant: _Tenant) -> str:
        self.tenants.add(tenant.task)
        tenant.task.add_done_callback(self._left)
        name = str(next(self._names))
        self.open[name] = tenant
        return name

    def remove(self, name: str) -> None:
        tenant = self.open.pop(name, None)
        if tenant is not None:
            tenant.end()

    def seal(self) -> None:
        self.sealed = True
        for name in list(self.open):
            self.remove(name)

    def _left(self, task: asyncio.Task[SandboxUsage | None]) -> None:
        self.tenants.discard(task)
        usage = None if task.cancelled() else task.result()
        if usage is not None:
            self.usage = usage if self.usage is None else summed([self.usage, usage])


class _Tenant:
    """One sandbox, owned by its own task, which outlives single requests.

    `opened` resolves to the sandbox or to the reason why there is none; the result of `task` is the
    usage, or None without a sandbox.
    """

    def __init__(
        self, opening: AbstractAsyncContextManager[InteractiveSandbox], most: SandboxLimits
    ) -> None:
        self.opened: asyncio.Future[ServedSandbox] = asyncio.get_running_loop().create_future()
        self._working: set[asyncio.Task[Any]] = set()
        self._over = asyncio.Event()
        self.task = asyncio.create_task(self._live(opening, most), name="sandbox")

    @property
    def served(self) -> ServedSandbox:
        if not self.opened.done():
            raise InputError("The sandbox is not open yet.")
        return self.opened.result()

    async def perform(self, operation: Coroutine[Any, Any, T]) -> T:
        """The operation is cancelled when the caller or the sandbox ends."""
        work = asyncio.create_task(operation)
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            _cancel_once(work)
            await asyncio.wait({work})
            raise
        if work.cancelled():
            raise InputError("The sandbox was closed meanwhile.")
        return work.result()

    def end(self) -> None:
        """Starts closing the sandbox; running programs are killed."""
        self._over.set()
        for work in self._working:
            _cancel_once(work)
        if not self.opened.done():
            self.task.cancel()

    async def close(self) -> None:
        self.end()
        await asyncio.wait({self.task})

    async def _live(
        self, opening: AbstractAsyncContextManager[InteractiveSandbox], most: SandboxLimits
    ) -> SandboxUsage | None:
        usage = None
        try:
            async with opening as sandbox:
                usage = SandboxUsage(executions=0)
                self.opened.set_result(served := ServedSandbox(sandbox, most))
                await self._over.wait()
                usage = await _last_total(served)
        except asyncio.CancelledError:
            self._failed(ended())
            raise
        except Exception as error:  # noqa: BLE001 - the requester gets it
            self._failed(error)
        return usage

    def _failed(self, error: Exception) -> None:
        if self.opened.done():
            _log.warning("sandbox_failed", error=str(error))
        else:
            self.opened.set_exception(error)
            self.opened.exception()  # mark as retrieved: there may be no waiter


def _cancel_once(work: asyncio.Task[Any]) -> None:
    """A second cancel would interrupt the wait for a program's end."""
    if not work.cancelling():
        work.cancel()


def _none_free() -> SandboxUnavailable:
    return SandboxUnavailable("Timed out waiting for a sandbox.")


async def _last_total(served: ServedSandbox) -> SandboxUsage:
    """Empty if the sandbox was lost."""
    try:
        async with asyncio.timeout(_LAST_SECONDS):
            await served.close()
            return await served.sandbox.total()
    except (EnvserverError, TimeoutError) as error:
        _log.warning("sandbox_usage_unknown", error=str(error) or "it does not answer")
        return SandboxUsage(executions=0)


def summed(usages: Sequence[SandboxUsage]) -> SandboxUsage:
    """Sums and highest peaks; exact if all are exact."""
    fields: dict[str, Any] = {}
    for name in SandboxUsage.__struct_fields__:
        values = [getattr(usage, name) for usage in usages]
        if name == "killed":
            fields[name] = dict(sum(map(Counter, values), Counter()))
        elif name.endswith("_exact"):
            fields[name] = all(values)
        else:
            fields[name] = max(values) if name in _PEAKS else sum(values)
    return SandboxUsage(**fields)
