"""An environment that this process cannot import: its own interpreter runs it.

In: the description of an installed environment. Out: a class for the server with the same
declarations and settings. What the server asks of an environment (tasks, demonstrations, final
answers) is asked of a host process in the environment's interpreter. Workers and scorers start in
that interpreter, too, and have the class itself.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

from envserver_records.errors import ConfigError, InputError
from envserver_records.records import Message, PublicTask, Result, Score, Split, Task
from pebble import ProcessExpired, ProcessPool

from ..environment import AgentRole, Environment, KnownResult, Service
from ..rollout_interface import ModelCall, Rollout
from . import host
from .description import HOOKS, Description, config_class
from .hosted_services import HostedServices
from .installed import Installed, Interpreter, usable_interpreter
from .interpreters import InterpreterContext

_LARGEST_BATCH = 64
_ATTEMPTS = 2


def hosted_class(one: Installed, described: Description) -> type[Environment]:
    """Returns the class that stands for an environment in the server.
    Raises ConfigError: its interpreter cannot be used any more.
    """
    interpreter = usable_interpreter(one)
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
        "installed": one,
        "file": described.file,
        "interpreter": interpreter,
        "has_services": bool(described.needs_server),
    }
    if described.scores_groups:
        members["score_group"] = _score_group
    members |= {name: _hook(name) for name in HOOKS if name in described.needs_server}
    return type(described.title, (HostedEnvironment,), members)


class HostedEnvironment(Environment):
    """Asks the environment's host process; see `host` for what runs there."""

    reference: ClassVar[str]
    installed: ClassVar[Installed]
    file: ClassVar[str]
    interpreter: ClassVar[Interpreter]
    has_services: ClassVar[bool]

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        arguments = (self.reference, self.config.model_dump(mode="json"))
        self._host = _Host(self.interpreter, arguments)
        self.config = self._completed_config()
        self.sandbox = self._host.call(host.sandbox)  # it may depend on the settings
        self.hosted = HostedServices(self.interpreter, *arguments)

    def _completed_config(self) -> Any:
        """Returns the settings as the environment's own Config made them: it may derive some.

        Those of agents stay: they hold keys, which its interpreter does not get.
        """
        # An integration of a newer envserver may have settings that the description does not.
        known = self.Config.model_fields
        made = {
            name: value for name, value in self._host.call(host.settings).items() if name in known
        }
        checked = self.Config.model_validate(made | {"agents": {}})
        return self.config.model_copy(
            update={name: getattr(checked, name) for name in made if name != "agents"}
        )

    def tasks(self, split: Split) -> Iterator[Task]:
        """Yields the tasks; they are fetched in batches that grow."""
        position, size = 0, 1
        while True:
            batch: list[Task] = self._host.call(host.tasks, split, position, size)
            yield from batch
            if len(batch) < size:
                return
            position += size
            size = min(2 * size, _LARGEST_BATCH)

    def rollout(self, task: PublicTask, run: Rollout) -> NoReturn:
        """Raises ConfigError: rollouts run in workers, which have the class itself."""
        raise ConfigError(
            f"{self.name!r} has an interpreter of its own and cannot run in this process.",
            hint="Debug one task: envserver run --env NAME --task ID --debug",
        )

    def score(self, task: Task, result: Result) -> Score:
        score: Score = self._ask("score", task, result)
        return score

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        return self.hosted.running() if self.has_services else nullcontext({})

    def agents(self) -> Mapping[str, AgentRole]:
        roles: Mapping[str, AgentRole] = self._ask("agents")
        return roles

    def demonstration(self, task: Task) -> list[Message] | Mapping[str, list[Message]] | None:
        messages: list[Message] | None = self._ask("demonstration", task)
        return messages

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return iter(self._ask("known_results", task))

    def baselines(self) -> Mapping[str, Mapping[str, Any]]:
        baselines: Mapping[str, Mapping[str, Any]] = self._ask("baselines")
        return baselines

    def task_from_row(self, row: dict[str, Any]) -> Task:
        task: Task = self._ask("task_from_row", row)
        return task

    def task_from_question(self, asked: Any) -> Task:
        task: Task = self._ask("task_from_question", asked)
        return task

    def final_answer(self, result: Result) -> str:
        return str(self._ask("final_answer", result))

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        result: Result = self._ask("response_from_row", response, messages)
        return result

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._host.call(host.method, method, arguments)


def _score_group(
    self: HostedEnvironment, task: Task, results: list[Result], scores: list[Score]
) -> list[Score]:
    adjusted: list[Score] = self._ask("score_group", task, results, scores)
    return adjusted


def _hook(name: str) -> Callable[[HostedEnvironment, ModelCall], Awaitable[None]]:
    async def hook(self: HostedEnvironment, call: ModelCall) -> None:
        await self.hosted.hook(name, call)

    return hook


class _Host:
    """The host process of one instance; it starts at the first call, and again if it died."""

    def __init__(self, interpreter: Interpreter, arguments: tuple[str, dict[str, Any]]) -> None:
        self._interpreter = interpreter
        self._arguments = arguments
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function of `host`; one that died is run again in a new process."""
        request = pickle.dumps((function, arguments))
        for attempt in itertools.count(1):
            try:
                answer = self._started().schedule(host.answer, args=(request,)).result()
                break
            except ProcessExpired as error:
                if attempt == _ATTEMPTS:
                    raise ConfigError(
                        f"The process of the environment {self._arguments[0]!r} died while it "
                        f"answered (exit status {error.exitcode}).",
                        hint=f"It runs in {self._interpreter.executable}.",
                    ) from error
        return _value(answer, self._arguments[0])

    def _started(self) -> ProcessPool:
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPool(
                    1,
                    initializer=host.start,
                    initargs=self._arguments,
                    context=InterpreterContext(self._interpreter),
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
            hint="Answer with what envserver and Python define.",
        ) from error
