"""Runs inside the host process of an environment, in the environment's own interpreter.

`answer` never raises. Tasks are deterministic, so a process that is started again goes on where the
last one ended.
"""

from __future__ import annotations

import itertools
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from envserver_records.errors import Blame, ConfigError, EnvserverError, Failure, Outcome
from envserver_records.records import SandboxSpec, Split, Task

from ..environment import Environment

_MOST_STREAMS = 4
"""Number of positions in the tasks that are remembered."""

_made: Environment | Failure | None = None
_streams: dict[tuple[str, int], Iterator[Task]] = {}
"""The rest of the tasks by (split, number of tasks before it)."""


class HostAnswer(msgspec.Struct, frozen=True):
    value: bytes = b""
    failure: Failure | None = None


def start(make: Callable[[], Environment]) -> None:
    """Makes the environment; a failure is kept and returned to every call."""
    global _made
    try:
        _made = make()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the server shows it
        _made = failure_of(error)


def answer(request: bytes) -> HostAnswer:
    """Runs a pickled (function of this module, arguments)."""
    if isinstance(_made, Failure):
        return HostAnswer(failure=_made)
    try:
        function, arguments = pickle.loads(request)
        return HostAnswer(value=pickle.dumps(function(*arguments)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the server shows it
        return HostAnswer(failure=failure_of(error))


def made() -> tuple[dict[str, Any], SandboxSpec | None]:
    """Returns the settings as the environment made them, and the sandbox that it declares."""
    environment = _environment()
    return environment.config.model_dump(mode="json"), environment.sandbox


def method(name: str, arguments: tuple[Any, ...]) -> Any:
    """Calls a method of the environment; returns a list instead of an iterator."""
    value = getattr(_environment(), name)(*arguments)
    return list(value) if isinstance(value, Iterator) else value


def tasks(split: Split, position: int, count: int) -> list[Task]:
    """Returns up to `count` tasks of a split, after the first `position`."""
    stream = _streams.pop((split, position), None)
    if stream is None:
        stream = itertools.islice(_environment().tasks(split), position, None)
    batch = list(itertools.islice(stream, count))
    _streams[split, position + count] = stream
    while len(_streams) > _MOST_STREAMS:
        _streams.pop(next(iter(_streams)))
    return batch


def _environment() -> Environment:
    assert isinstance(_made, Environment)
    return _made


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, EnvserverError):
        return error.failure()
    return Failure(
        kind=ConfigError.kind,
        blame=Blame.ENVIRONMENT,
        outcome=Outcome.DROP,
        message=f"The environment raised {type(error).__name__}: {str(error)[:500]}",
        detail={"traceback": "".join(traceback.format_exception(error))[-4000:]},
    )
