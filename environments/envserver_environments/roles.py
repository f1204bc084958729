"""Finds what the fields of a row are: the question, the answer, ..., under any of their names.

An environment has one table of roles and of the names that published sets give them. The row's own
fields decide, never the name of a set. A name with dots reaches into objects and lists
(`reward_model.ground_truth`, `choices.text`); a role's first name that has a value counts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

from envserver import InputError

Table = Mapping[str, tuple[str, ...]]
FIELDS_NAMED = 20
COLUMNS_HINT = """Name its fields: --env.columns '{"question": "...", "answer": "..."}'."""


def roles_of(row: Mapping[str, Any], table: Table, columns: Mapping[str, str]) -> dict[str, Any]:
    """Returns the row's values by role; a role without a value is not there.

    Args:
        table: names of each role, the likeliest first.
        columns: names that the user gives to roles, instead of the table's.

    Raises:
        InputError: a user's name is that of no field, or of no role.
    """
    for role, name in columns.items():
        if role not in table:
            raise InputError(f"There is no role {role!r} here.", hint=f"Roles: {', '.join(table)}.")
        if value_at(row, name) is None:
            raise InputError(f"The row has no field {name!r} ({fields_of(row)}).")
    found = {
        role: _first(row, (columns[role],) if role in columns else names)
        for role, names in table.items()
    }
    return {role: value for role, value in found.items() if value is not None}


def missing(row: Mapping[str, Any], roles: Iterable[str]) -> InputError:
    """The error for a row in which these roles were not found."""
    wanted = list(roles)
    return InputError(
        f"No known field of the row has its {' or '.join(wanted)} ({fields_of(row)}).",
        hint=f"""Name it: --env.columns '{{"{wanted[0]}": "FIELD"}}'.""",
    )


def fields_of(row: Mapping[str, Any]) -> str:
    """The names of the row's fields, for a message."""
    names = [str(name) for name in list(row)[:FIELDS_NAMED]]
    return f"its fields: {', '.join(names) or 'none'}{', ...' if len(row) > FIELDS_NAMED else ''}"


def value_at(row: Any, path: str) -> Any:
    """The value at a path such as `answer.value`, None where there is none or an empty one.

    Of a list, each object is asked, and the values are listed.
    """
    if isinstance(row, Mapping) and path in row:
        value = row[path]
        is_blank = isinstance(value, str) and not value.strip()
        return None if is_blank or value in ([], {}) or value != value else value
    name, _, rest = path.partition(".")
    if not rest:
        return None
    inner = decoded(row.get(name)) if isinstance(row, Mapping) else None
    if isinstance(inner, list):
        values = [value_at(one, rest) for one in inner]
        return values if values and all(value is not None for value in values) else None
    return value_at(inner, rest)


def decoded(value: Any) -> Any:
    """What a text holds that is a list or an object in JSON or Python, as tables have nested
    fields; else `value`."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value.strip())
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return value


def last_message(value: Any) -> Any:
    """What the user says last in a conversation; anything else unchanged."""
    messages = decoded(value)
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        return value
    said = [one.get("content") for one in messages if one.get("role") == "user"][-1:]
    if said and isinstance(said[0], list):  # in parts
        return "".join(str(part.get("text", "")) for part in said[0] if isinstance(part, Mapping))
    return said[0] if said else None


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    values = (value_at(row, name) for name in names)
    return next(
        (
            value
            for value in values
            if value is not None and value is not True and value is not False
        ),
        None,
    )
