"""Typed tasks: a dataclass or msgspec struct instead of two dicts, so that mypy knows the fields.

    @dataclass
    class Sum:
        id: str
        question: str
        answer: Hidden[int]

    class Addition(Environment[Sum]):
        def tasks(self, split: Split) -> Iterator[Sum]:
            yield Sum("sum-0", "1 + 1?", 2)

In: an environment class of such rows. Out: `plain(it)`, a subclass whose methods take and give
`Task`s, as everything behind the registry does. Invariants: a worker gets a row without its
hidden fields; reading one there raises an AttributeError that says so.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, NoReturn, TypeVar

import msgspec
from envserver_records.errors import ConfigError, InputError
from envserver_records.tasks import PublicTask, Task

from ..environment import Environment

T = TypeVar("T")
_HIDDEN: Final = "envserver.hidden"
Hidden = Annotated[T, _HIDDEN]
"""A field of a row that never leaves the server and the scorer: `answer: Hidden[str]`."""
_TASK_FIRST = ("harness_task", "score", "score_group", "demonstration", "known_results")
"""Methods whose first argument is a task, besides `rollout`."""


class RowType:
    def __init__(self, row: type[Any]) -> None:
        if not dataclasses.is_dataclass(row) and not issubclass(row, msgspec.Struct):
            raise ConfigError(f"{row.__name__} is neither a dataclass nor a msgspec struct.")
        self.row = row
        try:
            hints = typing.get_type_hints(row, include_extras=True)
        except NameError as error:
            raise ConfigError(f"{row.__name__}: a type is not known: {error}.") from error
        self._types = {name: hints[name] for name in _fields(row)}
        if self._types.pop("id", None) is not str:
            raise ConfigError(
                f"{row.__name__} has no field `id: str`.",
                hint="It names the task: unique and stable within its split.",
            )
        self._hidden = {name for name, kind in self._types.items() if _is_hidden(kind)}

    def task(self, row: Any) -> Task:
        parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for name in self._types:
            value = msgspec.to_builtins(getattr(row, name))
            parts[name in self._hidden][name] = value
        return Task(row.id, *parts)

    def of(self, task: PublicTask) -> Any:
        """Returns the row of a task; of a public one, without its hidden fields."""
        known = {**task.public, **getattr(task, "hidden", {})}
        is_whole = isinstance(task, Task)
        values = {
            name: msgspec.convert(known[name], kind)
            for name, kind in self._types.items()
            if name in known and (is_whole or name not in self._hidden)
        }
        if not is_whole:
            values |= {name: _NotHere(name) for name in self._hidden}
        return self.row(**{"id": task.id, **values})

    def read(self, row: dict[str, Any]) -> Task:
        try:
            return self.task(msgspec.convert({"id": "row", **row}, self.row))
        except msgspec.ValidationError as error:
            raise InputError(f"The row is not a {self.row.__name__}: {error}.") from error


def row_type(environment: type[Environment[Any]]) -> RowType | None:
    """Returns the row class that `class X(Environment[Row])` names; None: its tasks are plain."""
    for ancestor in environment.__mro__:
        for base in vars(ancestor).get("__orig_bases__", ()):
            origin = typing.get_origin(base)
            if inspect.isclass(origin) and issubclass(origin, Environment):
                (row,) = typing.get_args(base)
                if inspect.isclass(row) and row is not Task:
                    return RowType(row)
    return None


def plain(environment: type[Environment[Any]]) -> type[Environment]:
    """Returns a class like `environment` whose methods take and give plain `Task`s."""
    rows = row_type(environment)
    if rows is None:
        return environment
    body: dict[str, Any] = {
        "__module__": environment.__module__,
        "__qualname__": environment.__qualname__,
        "__doc__": environment.__doc__,
        "name": environment.name,
        "tasks": _tasks(environment.tasks, rows),
        "rollout": _rollout(environment.rollout, rows),
        "task_from_row": _task_from_row(environment, rows),
        "task_from_question": _given(environment.task_from_question, rows),
    }
    for name in _TASK_FIRST:
        method = getattr(environment, name)
        if method is not getattr(Environment, name):
            body[name] = _taken(method, rows)
    return types.new_class(
        environment.__name__, (environment,), exec_body=lambda space: space.update(body)
    )


def _tasks(method: Callable[..., Any], rows: RowType) -> Callable[..., Iterator[Task]]:
    @functools.wraps(method)
    def tasks(self: Any, split: str) -> Iterator[Task]:
        return map(rows.task, method(self, split))

    return tasks


def _rollout(method: Callable[..., Any], rows: RowType) -> Callable[..., Any]:
    """Wraps `rollout`; a coroutine function stays one, a plain function is run in a thread."""
    if not inspect.iscoroutinefunction(method):
        return _taken(method, rows)

    @functools.wraps(method)
    async def rollout(self: Any, task: PublicTask, run: Any) -> Any:
        return await method(self, rows.of(task), run)

    return rollout


def _taken(method: Callable[..., Any], rows: RowType) -> Callable[..., Any]:
    @functools.wraps(method)
    def taken(self: Any, task: PublicTask, *others: Any) -> Any:
        return method(self, rows.of(task), *others)

    return taken


def _given(method: Callable[..., Any], rows: RowType) -> Callable[..., Task]:
    @functools.wraps(method)
    def given(self: Any, asked: Any) -> Task:
        return rows.task(method(self, asked))

    return given


def _task_from_row(environment: type[Environment[Any]], rows: RowType) -> Callable[..., Task]:
    if environment.task_from_row is not Environment.task_from_row:
        return _given(environment.task_from_row, rows)
    return lambda self, row: rows.read(row)


def _fields(row: type[Any]) -> list[str]:
    if dataclasses.is_dataclass(row):
        return [field.name for field in dataclasses.fields(row)]
    return list(row.__struct_fields__)


def _is_hidden(kind: Any) -> bool:
    return _HIDDEN in getattr(kind, "__metadata__", ())


class _NotHere:
    """Stands for a hidden field in a worker: using it raises an AttributeError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return "<hidden>"

    def _refuse(self, *_: Any) -> NoReturn:
        raise AttributeError(
            f"The field {self._name!r} is hidden: `rollout` runs in a worker, which never gets it."
        )

    __str__ = __bool__ = __eq__ = __hash__ = __len__ = __iter__ = __getitem__ = _refuse
    __int__ = __float__ = __add__ = __radd__ = __contains__ = __lt__ = __gt__ = __format__ = _refuse
