"""Finds what the fields of a row are: the question, the answer, ..., under any of their names.

An environment has one table of roles and of the names that published sets give them. The row's own
fields decide, never the name of a set. A name with dots reaches into objects and lists
(`reward_model.ground_truth`, `choices.text`); a role's first name that has a value counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from envserver import InputError
from envserver.row_counts import took

Table = Mapping[str, tuple[str, ...]]
FIELDS_NAMED = 20


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
    named = {role: one for role, one in found.items() if one is not None}
    _, solution = named.get("solution", ("", ""))
    took([f"{role}: {name}" for role, (name, _) in named.items()], str(solution))
    return {role: value for role, (_, value) in named.items()}


def missing(row: Mapping[str, Any], roles: Iterable[str]) -> InputError:
    """The error for a row in which these roles were not found."""
    wanted = list(roles)
    return InputError(
        f"No field of the row is known as its {' or '.join(wanted)} ({fields_of(row)}).",
        hint=f"""Name it: --env.columns '{{"{wanted[0]}": "FIELD"}}'.""",
    )


def fields_of(row: Mapping[str, Any]) -> str:
    """The names of the row's fields, for a message."""
    names = [str(name) for name in list(row)[:FIELDS_NAMED]]
    return f"its fields: {', '.join(names) or 'none'}{', ...' if len(row) > FIELDS_NAMED else ''}"


def value_at(row: Any, path: str) -> Any:
    """The value at a path such as `answer.value`, None where there is none or an empty one.

    Of a list, each object is asked, and the values are listed. Text that holds JSON counts as
    what it holds, as tables have nested fields.
    """
    if isinstance(row, Mapping) and path in row:
        value = row[path]
        return None if value in ("", [], {}) else value
    name, _, rest = path.partition(".")
    if not rest:
        return None
    inner = row.get(name) if isinstance(row, Mapping) else None
    if isinstance(inner, str) and inner.lstrip().startswith(("{", "[")):
        try:
            inner = json.loads(inner)
        except ValueError:
            return None
    if isinstance(inner, list):
        values = [value_at(one, rest) for one in inner]
        return values if values and all(value is not None for value in values) else None
    return value_at(inner, rest)


def _first(row: Mapping[str, Any], names: Iterable[str]) -> tuple[str, Any] | None:
    """The first name that has a value, and the value."""
    values = ((name, value_at(row, name)) for name in names)
    return next(
        (one for one in values if one[1] is not None and not isinstance(one[1], bool)), None
    )
