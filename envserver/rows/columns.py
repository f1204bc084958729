"""Turns one row into a task: which columns are asked, which are hidden. Pure.

In: a row and the names of its columns. Out: a Task whose public part has the conversation to send
and the columns that it is made of; all other columns are hidden. What makes no task is an
InputError with the name of the column.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from envserver_records.errors import ConfigError, InputError
from envserver_records.records import Message, Task

from .counts import took
from .sources import Row

ANSWER = "answer"
"""The column of the answer, where none is named and a row has it."""


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
        """Returns the task of `row`.

        Raises:
            InputError: a column is missing or holds no such value; `detail["column"]` names it.
        """
        asked = columns_in(self.prompt)
        answer = self.answer or (ANSWER if ANSWER in row else "")
        took([*(f"prompt: {name}" for name in asked), *([f"answer: {answer}"] if answer else [])])
        shown = {name: _plain(_value(row, name)) for name in asked}
        shown = {name: value for name, value in shown.items() if not isinstance(value, list)}
        hidden: dict[str, Any] = {"columns": {}}
        if answer:
            hidden["answer"] = _plain(_present(row, answer))
        wanted = self.names or {name: name for name in row}
        for name, column in wanted.items():
            value = _plain(_value(row, column))
            if column not in asked:
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
                raise _bad(template, f"is not a text but {type(value).__name__}")
            return value
        return "".join(
            text + ("" if name is None else str(_present(row, name)))
            for text, name, _, _ in string.Formatter().parse(template)
        )


def columns_in(template: str) -> list[str]:
    """Returns the columns of a prompt: its own name, or those in its braces.
    Raises ConfigError: its braces do not match.
    """
    if "{" not in template:
        return [template]
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"{template!r} is not a text with columns in braces: {error}.",
            hint="Write {{ and }} for braces that stay.",
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
