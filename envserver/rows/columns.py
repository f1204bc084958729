"""Turns one row into a task: which columns are asked, which are hidden. Pure.

What makes no task is an InputError with the name of the column.
"""

from __future__ import annotations

import logging
import math
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from envserver_records.errors import ConfigError, InputError
from envserver_records.tasks import Message, Task

from .sources import Row

MAX_UNUSABLE_ROWS = 1000
"""Unusable rows at the start of a data set, before it is taken for the wrong one."""
CAUSES_SHOWN = 8

_logger = logging.getLogger("envserver_environments.usable")


class _Notes(msgspec.Struct):
    fields: tuple[str, ...] = ()
    solution: str = ""
    doubts: list[str] = []


_row: ContextVar[_Notes | None] = ContextVar("row", default=None)


class Origin(msgspec.Struct, frozen=True):
    place: str
    solution: str


class Places(msgspec.Struct):
    count: int
    first: str


class RowCount(msgspec.Struct):
    """Counts of the rows of one data set.

    Args:
        dropped: rows that made no task, by cause.
        doubtful: rows whose answer is doubtful, by cause; they are used.
        fields: number of rows by the field that was taken for something: "question: problem".
        layouts: rows by all the fields that were taken.
    """

    read: int = 0
    used: int = 0
    dropped: dict[str, Places] = {}
    doubtful: dict[str, Places] = {}
    fields: Counter[str] = msgspec.field(default_factory=Counter)
    layouts: dict[str, Places] = {}


def took(fields: Iterable[str], solution: str = "") -> None:
    """Reports the fields that the row being read has, or those taken: "question: problem"."""
    if notes := _row.get():
        notes.fields, notes.solution = tuple(fields), solution


def doubt(cause: str) -> None:
    """Reports why the answer of the row being read is doubtful."""
    if notes := _row.get():
        notes.doubts.append(cause)


@contextmanager
def unreported() -> Iterator[None]:
    """Within the block other rows may be read: what they report does not count."""
    token = _row.set(None)
    try:
        yield
    finally:
        _row.reset(token)


class RowCounts:
    """Counts the rows of each data set: read, used and dropped in the last pass over it."""

    def __init__(self) -> None:
        self.of: dict[str, RowCount] = {}
        self.origins: dict[str, Origin] | None = None
        """Rows by the ids of their tasks. Where a dict is set before `tasks`, it is filled, and
        fields and doubts are counted."""

    def usable(
        self, name: str, read: Iterable[tuple[str, Task | str]], *, hint: str = ""
    ) -> Iterator[Task]:
        """Yields the tasks among `read`, and says at the end what became of the rows.

        Args:
            name: the data set's name.
            read: for each row its place, and its task or why there is none.
            hint: hint of the error if no row is usable.
        """
        return self.reported(name, self.tasks(name, read), hint=hint)

    def tasks(
        self,
        name: str,
        read: Iterable[tuple[str, Task | str]],
        most_unusable: int = MAX_UNUSABLE_ROWS,
    ) -> Iterator[Task]:
        """Like `usable`, for tasks that are looked at again before `reported` gets them."""
        counts = self.of[name] = RowCount()
        rows = iter(read)
        made = False
        while True:
            _row.set(notes := _Notes())
            first = next(rows, None)
            _row.set(None)
            if first is None:
                return
            place, task = first
            counts.read += 1
            if self.origins is not None:
                _note(counts, notes, place)
                if isinstance(task, Task):
                    self.origins[task.id] = Origin(place, notes.solution)
            if isinstance(task, Task):
                made = True
                yield task
                continue
            self.drop(name, task, place)
            if not made and counts.read >= most_unusable:
                return

    @property
    def dropped(self) -> Counter[str]:
        causes: Counter[str] = Counter()
        for counts in self.of.values():
            causes.update({cause: places.count for cause, places in counts.dropped.items()})
        return causes

    def drop(self, name: str, cause: str, place: str) -> None:
        _count(self.of[name].dropped, cause, place)

    def reported(self, name: str, tasks: Iterable[Task], *, hint: str = "") -> Iterator[Task]:
        """Yields `tasks`; then logs a line with the rows read, used and dropped, by cause."""
        for task in tasks:
            self.of[name].used += 1
            yield task
        counts = self.of.get(name, RowCount())
        if not counts.used:
            why = "; ".join(causes(counts.dropped)) or "it is empty"
            raise ConfigError(f"The data set {name!r} has no usable row: {why}.", hint=hint)
        if counts.dropped:
            text = "%s: %d rows read, %d used, %d dropped: %s"
            dropped = sum(places.count for places in counts.dropped.values())
            why = "; ".join(causes(counts.dropped))
            _logger.warning(text, name, counts.read, counts.used, dropped, why)
        else:
            _logger.info("%s: %d rows read, all used", name, counts.read)


def _note(counts: RowCount, notes: _Notes, place: str) -> None:
    counts.fields.update(notes.fields)
    if notes.fields:
        _count(counts.layouts, ", ".join(notes.fields), place)
    for cause in notes.doubts:
        _count(counts.doubtful, cause, place)


def causes(rows: dict[str, Places]) -> list[str]:
    """Returns the most frequent causes as text, with the place of the first row of each."""
    ordered = sorted(rows.items(), key=lambda entry: -entry[1].count)
    more = len(ordered) - CAUSES_SHOWN
    return [
        *(
            f"{places.count} x {cause.rstrip('.')} (first: {places.first})"
            for cause, places in ordered[:CAUSES_SHOWN]
        ),
        *([f"and {more} more"] if more > 0 else []),
    ]


def in_file(place: str) -> tuple[int, str]:
    """Sorts the places of one file by their numbers, for rows that are read in another order."""
    return len(place), place


def _count(rows: dict[str, Places], cause: str, place: str) -> None:
    places = rows.setdefault(cause, Places(0, place))
    places.count += 1
    places.first = min(places.first, place, key=in_file)


ANSWER = "answer"


@dataclass(frozen=True)
class Columns:
    """What the columns mean.

    Args:
        prompt: a column (a text, or a conversation as a list of messages), or a text with columns
            in braces: "{question} Answer in a word."
        answer: the column of the right answer; "": `ANSWER`, if the row has it.
        demonstration: a text of a right completion, as `prompt`; "": the answer.
        system: a system message before each prompt.
        names: the columns that reward functions see, by the names that they see; empty: all of
            them, by their own.
    """

    prompt: str = "prompt"
    answer: str = ""
    demonstration: str = ""
    system: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def task(self, task_id: str, row: Row) -> Task:
        columns = columns_in(self.prompt)
        answer = self.answer or (ANSWER if ANSWER in row else "")
        took([*(f"prompt: {name}" for name in columns), *([f"answer: {answer}"] if answer else [])])
        shown = {name: _plain(_value(row, name)) for name in columns}
        shown = {name: value for name, value in shown.items() if not isinstance(value, list)}
        hidden: dict[str, Any] = {"columns": {}}
        if answer:
            hidden["answer"] = _plain(_present(row, answer))
        wanted = self.names or {name: name for name in row}
        for name, column in wanted.items():
            value = _plain(_value(row, column))
            if column not in columns:
                hidden["columns"][name] = value
            elif name != column:
                shown[name] = value
        if self.demonstration:
            hidden["demonstration"] = self._text(self.demonstration, row)
        return Task(task_id, {"messages": self._messages(row), "columns": shown}, hidden)

    def _messages(self, row: Row) -> list[Message]:
        before: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        value = row.get(self.prompt) if "{" not in self.prompt else None
        if isinstance(value, list):
            if not value or not all(map(_is_message, value)):
                raise _bad(self.prompt, "is not a list of messages with `role` and `content`")
            return [*before, *_plain(value)]
        return [*before, {"role": "user", "content": self._text(self.prompt, row)}]

    def _text(self, template: str, row: Row) -> str:
        if "{" not in template:
            value = _present(row, template)
            if not isinstance(value, str):
                raise _bad(template, f"is not a string but {type(value).__name__}")
            return value
        return "".join(
            text + ("" if name is None else str(_present(row, name)))
            for text, name, _, _ in string.Formatter().parse(template)
        )


def columns_in(template: str) -> list[str]:
    if "{" not in template:
        return [template]
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"{template!r} is not a template with columns in braces: {error}.",
            hint="Write {{ and }} for literal braces.",
        ) from error
    return list(dict.fromkeys(names))


def _value(row: Row, column: str) -> Any:
    """Returns a column, or a part of one: `reward_model.ground_truth`."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise _bad(column, f"is missing; there are {', '.join(row) or 'no columns'}")
        value = value[part]
    return value


def _present(row: Row, column: str) -> Any:
    value = _value(row, column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise _bad(column, "has no value")
    if isinstance(value, str) and not value.strip():
        raise _bad(column, "is empty")
    return value


def _bad(column: str, reason: str) -> InputError:
    return InputError(f"the column {column!r} {reason}", column=column)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _plain(value: Any) -> Any:
    """Returns `value` as JSON has it: times as text, bytes in base64."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=str)
