"""An environment that this process cannot import: a class of the same declarations and settings.

What the server asks of it (tasks, demonstrations, final answers) is asked of a host process in the
environment's interpreter. Workers and scorers start there, too, and have the class itself.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import itertools
import pickle
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, NoReturn

import msgspec
import structlog
from envserver_records.errors import (
    ConfigError,
    EnvserverError,
    Failure,
    InputError,
    RolloutError,
    ServiceError,
    UsageError,
    by_kind,
)
from envserver_records.records import PublicTask, Result, Split, Task
from envserver_records.waiting import cancel_and_wait
from pebble import ProcessExpired, ProcessPool

from ..environment import Caller, Environment, KnownResult, Service, Services
from ..rollout_interface import HookBug, ModelCall, Rollout
from ..tools.calling import may_be_bug
from . import host, service_host
from .description import HOOKS, Description, config_class
from .installed import Installed, Interpreter, usable_interpreter
from .interpreters import InterpreterContext
from .service_host import Answer, Bug, Flagged, Offer, Request, ignored

END_SECONDS = 10.0
"""Seconds for the process to leave its services and end; then it is killed."""
# The API has another class of the kind "input", with other arguments.
_KINDS = by_kind(UsageError, RolloutError) | {InputError.kind: InputError}

_log = structlog.get_logger("envserver.services")
_Make = Callable[[], Environment]


@dataclass(eq=False, repr=False)
class HostedServices:
    """The process of an environment's services and hooks; `make`: called in its interpreter."""

    interpreter: Interpreter
    reference: str
    make: _Make

    def __post_init__(self) -> None:
        self._process: _HostProcess | None = None
        self._starting = asyncio.Lock()
        self._counts: Mapping[str, float] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Services]:
        try:
            offer = (await self._current()).offer
            services: dict[str, Service] = {
                name: partial(self._serve, name) for name in offer.names
            }
            yield Services(
                services,
                state=self._state if offer.has_state else None,
                counts=lambda: self._counts,
                shown=self._shown,
            )
        finally:
            if self._process is not None:
                await self._process.end()

    async def hook(self, name: str, call: ModelCall) -> None:
        sent = copy.copy(call)
        process, sent.caller = await self._for(call.caller)
        call.reason, call.refused, call.changes = await self._asked(
            process, call.caller.flag, _hook_bug, "hook", name, sent
        )

    async def _serve(self, name: str, arguments: dict[str, Any], caller: Caller) -> Any:
        process, sent = await self._for(caller)
        bug = partial(_logged, f"service {name!r}", caller.rollout_id)
        return await self._asked(process, caller.flag, bug, "service", name, arguments, sent)

    @asynccontextmanager
    async def _state(self, task: Task) -> AsyncIterator[_State]:
        process, bug = await self._current(), partial(_logged, "rollout's state", "")
        state = _State(process, await self._asked(process, ignored, bug, "open_state", task))
        try:
            yield state
        finally:
            bug = partial(_logged, "end of a rollout's state", "")
            with contextlib.suppress(ServiceError):  # it is gone with its process
                await self._asked(process, ignored, bug, "close_state", state.number)

    async def _shown(self, group_id: str) -> dict[str, Any]:
        bug = partial(_logged, "environment's process", "")
        try:
            process = await self._current()
            shown: dict[str, Any] = await self._asked(process, ignored, bug, "shown", group_id)
        except ServiceError:
            return {}
        return shown

    async def _current(self) -> _HostProcess:
        async with self._starting:
            if self._process is None or self._process.ended:
                if self._process is not None:
                    await self._process.end()
                    _log.error("service_host_ended", environment=self.reference)
                self._process = await _HostProcess.start(
                    self.interpreter, self.reference, self.make
                )
            return self._process

    async def _for(self, caller: Caller) -> tuple[_HostProcess, Caller]:
        """Returns the process that has the caller's state, and what it gets of the caller."""
        state = caller.state
        if isinstance(state, _State):
            return state.process, replace(caller, flag=ignored, state=state.number)
        return await self._current(), replace(caller, flag=ignored, state=None)

    async def _asked(
        self,
        process: _HostProcess,
        flag: Callable[[str], object],
        error_of_bug: Callable[[Bug], Exception],
        what: str,
        *arguments: Any,
    ) -> Any:
        answer = await process.ask(flag, what, arguments)
        self._counts = answer.counts
        if answer.failure is not None:
            raise error_of(answer.failure)
        if answer.bug is not None:
            raise error_of_bug(answer.bug)
        try:
            return pickle.loads(answer.value)
        except Exception as error:
            raise ServiceError(
                f"The environment {self.reference!r} answered with an object that only its own "
                f"interpreter knows: {type(error).__name__}."
            ) from error


def _hook_bug(bug: Bug) -> HookBug:
    return HookBug(f"{bug.kind}: {bug.message} {bug.place}", bug.kind, bug.traceback)


def _logged(what: str, rollout_id: str, bug: Bug) -> ServiceError:
    """The message may hold addresses and keys: it goes to the log only."""
    _log.error("service_failed", rollout_id=rollout_id, what=what, traceback=bug.traceback)
    said, kind = f"{hash(bug.message):x}", getattr(builtins, bug.kind, None)
    failed = f"The {what} failed: {bug.kind} {bug.place}"
    error: Exception = EnvserverError("")
    if isinstance(kind, type) and issubclass(kind, Exception):
        error = kind("") if issubclass(kind, OSError) else Exception()  # others need arguments
    return ServiceError(failed, place="", said=said, **may_be_bug(error))


class _State(msgspec.Struct, frozen=True, eq=False):
    process: _HostProcess
    number: int


@dataclass(eq=False, repr=False)
class _HostProcess:
    process: BaseProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __post_init__(self) -> None:
        self.offer = Offer(names=[], has_state=False)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._flags: dict[int, Callable[[str], object]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, interpreter: Interpreter, reference: str, make: _Make) -> _HostProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = InterpreterContext(interpreter).Process(
                target=service_host.main, args=(theirs, make), daemon=True
            )
            process.start()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        made = cls(process, reader, writer)
        try:
            await made._take_offer(reference, interpreter)
        except BaseException:
            await made.end()
            raise
        made._reading = asyncio.create_task(made._read())
        return made

    @property
    def ended(self) -> bool:
        return self._reading is None or self._reading.done()

    async def ask(
        self, flag: Callable[[str], object], what: str, arguments: tuple[Any, ...]
    ) -> Answer:
        if self.ended:
            raise self._died()
        number = next(self._numbers)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number], self._flags[number] = answered, flag
        try:
            service_host.send(self.writer, Request(number, what, arguments))
            with contextlib.suppress(ConnectionError):  # then the reader ends
                await self.writer.drain()
            return await answered
        except asyncio.CancelledError:
            service_host.send(self.writer, Request(number, "cancel"))
            raise
        finally:
            del self._waiting[number], self._flags[number]

    async def end(self) -> None:
        """Lets the process leave its services and end; kills it if it does not."""
        self.writer.close()
        await asyncio.to_thread(self.process.join, END_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            await asyncio.to_thread(self.process.join)
        if self._reading is not None:
            await cancel_and_wait(self._reading)

    async def _take_offer(self, reference: str, interpreter: Interpreter) -> None:
        answer: Answer | None = await service_host.receive(self.reader)
        if answer is None:
            raise ConfigError(
                f"The process of the services of {reference!r} died at its start.",
                hint=f"It runs in {interpreter.executable}; its output says why.",
            )
        if answer.failure is not None:
            error = answer.failure
            raise ConfigError(error.message, hint=error.hint, **error.detail)
        self.offer = pickle.loads(answer.value)

    async def _read(self) -> None:
        try:
            while (message := await service_host.receive(self.reader)) is not None:
                if isinstance(message, Flagged):
                    self._flags.get(message.number, ignored)(message.word)
                elif (answered := self._waiting.get(message.number)) and not answered.done():
                    answered.set_result(message)
        finally:
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_exception(self._died())

    def _died(self) -> ServiceError:
        return ServiceError("The process of the environment's services ended.")


def error_of(failure: Failure) -> EnvserverError:
    kind = _KINDS.get(failure.kind, ServiceError)
    return kind(failure.message, hint=failure.hint, **failure.detail)


_LARGEST_BATCH = 64
_ATTEMPTS = 2


def hosted_class(
    package: Installed, described: Description, make: Callable[[str, dict[str, Any]], Environment]
) -> type[Environment]:
    """Returns the class that stands for an environment in the server. `make`: called with its name
    and settings in its own interpreter."""
    interpreter = usable_interpreter(package)
    low, high = described.declared["reward_range"]
    members: dict[str, Any] = {
        **described.declared,
        "__doc__": described.summary,
        "__module__": __name__,
        "name": described.title,
        "reward_range": (float(low), float(high)),
        "sandbox": described.sandbox,
        "Config": config_class(described),
        "reference": described.name,
        "installed": package,
        "file": described.file,
        "interpreter": interpreter,
        "has_services": bool(described.needs_server),
        "make": staticmethod(make),
    }
    if described.scores_groups:
        members["score_group"] = _asked("score_group")
    members |= {name: _hook(name) for name in HOOKS if name in described.needs_server}
    return type(described.title, (HostedEnvironment,), members)


def _asked(method: str) -> Any:
    def ask(self: HostedEnvironment, *arguments: Any) -> Any:
        return self._ask(method, *arguments)

    return ask


class HostedEnvironment(Environment):
    reference: ClassVar[str]
    installed: ClassVar[Installed]
    file: ClassVar[str]
    interpreter: ClassVar[Interpreter]
    has_services: ClassVar[bool]
    make: ClassVar[staticmethod[[str, dict[str, Any]], Environment]]

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        make = partial(self.make, self.reference, self.config.model_dump(mode="json"))
        self._host = _Host(self.interpreter, self.reference, make)
        settings, self.sandbox = self._host.call(host.made)
        self.config = self._completed_config(settings)
        self.hosted = HostedServices(self.interpreter, self.reference, make)

    def _completed_config(self, settings: dict[str, Any]) -> Any:
        """Returns the settings as the environment's own Config made them: it may derive some.

        Those of agents stay: they hold keys, which its interpreter does not get.
        """
        # An integration of a newer envserver may have settings that the description does not.
        known = self.Config.model_fields
        made = {name: value for name, value in settings.items() if name in known}
        checked = self.Config.model_validate(made | {"agents": {}})
        return self.config.model_copy(
            update={name: getattr(checked, name) for name in made if name != "agents"}
        )

    def tasks(self, split: Split) -> Iterator[Task]:
        position, size = 0, 1
        while True:
            batch: list[Task] = self._host.call(host.tasks, split, position, size)
            yield from batch
            if len(batch) < size:
                return
            position += size
            size = min(2 * size, _LARGEST_BATCH)

    def rollout(self, task: PublicTask, run: Rollout) -> NoReturn:
        raise ConfigError(
            f"{self.name!r} has an interpreter of its own and cannot run in this process.",
            hint="Debug one task: envserver run --env NAME --task ID --debug",
        )

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        return self.hosted.running() if self.has_services else nullcontext({})

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return iter(self._ask("known_results", task))

    def final_answer(self, result: Result) -> str:
        return str(self._ask("final_answer", result))

    score = _asked("score")
    agents = _asked("agents")
    demonstration = _asked("demonstration")
    baselines = _asked("baselines")
    task_from_row = _asked("task_from_row")
    task_from_question = _asked("task_from_question")
    response_from_row = _asked("response_from_row")

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._host.call(host.method, method, arguments)


def _hook(name: str) -> Callable[[HostedEnvironment, ModelCall], Awaitable[None]]:
    async def hook(self: HostedEnvironment, call: ModelCall) -> None:
        await self.hosted.hook(name, call)

    return hook


@dataclass(eq=False, repr=False)
class _Host:
    """The host process of one instance; it starts at the first call, and again if it died."""

    interpreter: Interpreter
    reference: str
    make: _Make

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        request = pickle.dumps((function, arguments))
        for attempt in itertools.count(1):
            try:
                answer = self._started().schedule(host.answer, args=(request,)).result()
                break
            except ProcessExpired as error:
                if attempt == _ATTEMPTS:
                    raise ConfigError(
                        f"The process of the environment {self.reference!r} died while it "
                        f"answered (exit status {error.exitcode}).",
                        hint=f"It runs in {self.interpreter.executable}.",
                    ) from error
        return _value(answer, self.reference)

    def _started(self) -> ProcessPool:
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPool(
                    1,
                    initializer=host.start,
                    initargs=(self.make,),
                    context=InterpreterContext(self.interpreter),
                )
                weakref.finalize(self, self._pool.stop)
            return self._pool


def _value(answer: host.HostAnswer, name: str) -> Any:
    if answer.failure is not None:
        kind = InputError if answer.failure.kind == InputError.kind else ConfigError
        raise kind(answer.failure.message, hint=answer.failure.hint, **answer.failure.detail)
    try:
        return pickle.loads(answer.value)
    except Exception as error:
        raise ConfigError(
            f"The environment {name!r} answered with an object that only its own interpreter "
            f"knows: {type(error).__name__}: {error}.",
            hint="Return types that envserver and Python define.",
        ) from error
