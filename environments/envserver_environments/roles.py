"""Finds what the fields of a row are: the question, the answer, ..., under any of their names.

An environment has one table of roles and of the names that published sets give them. The row's own
fields decide, never the name of a set. A name with dots reaches into objects and lists
(`reward_model.ground_truth`, `choices.text`); a role's first name that has a value counts.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from envserver import InputError
from envserver.row_counts import took

Table = Mapping[str, tuple[str, ...]]
FIELDS_NAMED = 20
_APART = re.compile(r"""(['"])\s+(['"])""")
"""The gap between two texts in a printed numpy array."""


def table_of(**names: str) -> Table:
    """A table of the names of each role, which commas separate, the likeliest first."""
    return {role: tuple(several.split(", ")) for role, several in names.items()}


def roles_of(row: Mapping[str, Any], table: Table, columns: Mapping[str, str]) -> dict[str, Any]:
    """Returns the row's values by role; a role without a value is not there.

    Args:
        table: names of each role, the likeliest first.
        columns: names that the user gives to roles, instead of the table's.
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


def spelled(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with "yes" and "no" for booleans, where these may be answers."""
    return {
        name: text_of(value) if isinstance(value, bool) else value for name, value in row.items()
    }


def missing(row: Mapping[str, Any], roles: Iterable[str]) -> InputError:
    """The error for a row in which these roles were not found."""
    wanted = list(roles)
    return InputError(
        f"No known field of the row has its {' or '.join(wanted)} ({fields_of(row)}): name it by"
        f""" --env.columns '{{"{wanted[0]}": "FIELD"}}'."""
    )


def fields_of(row: Mapping[str, Any]) -> str:
    """The names of the row's fields, for a message."""
    names = [
        f"{name}{' (empty)' if value_at(row, name) is None else ''}"
        for name in list(row)[:FIELDS_NAMED]
    ]
    return f"its fields: {', '.join(names) or 'none'}{', ...' if len(row) > FIELDS_NAMED else ''}"


def value_at(row: Any, path: str) -> Any:
    """The value at a path such as `answer.value`, None where there is none or an empty one.

    Of a list, each object is asked, also those of lists in it, and the values are listed.
    """
    if isinstance(row, Mapping) and path in row:
        value = row[path]
        value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
        is_blank = isinstance(value, str) and not value.strip()
        return None if is_blank or value in ([], {}) or value != value else value
    name, _, rest = path.partition(".")
    if not rest:
        return None
    inner = decoded(row.get(name)) if isinstance(row, Mapping) else None
    if isinstance(inner, list):
        parts = [part for one in inner for part in (one if isinstance(one, list) else [one])]
        values = [value_at(part, rest) for part in parts]
        return values if values and all(value is not None for value in values) else None
    return value_at(inner, rest)


def decoded(value: Any) -> Any:
    """Parses text that holds a JSON or Python list or object; returns any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    listed = _APART.sub(r"\1,\2", value.strip())
    for parse, text in ((json.loads, value), (ast.literal_eval, listed)):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return parse(text)
    return value


def by_label(options: Any) -> Any:
    """Returns `[{"A": "red"}, ...]` and `[["A", "red"], ...]` as an object; else `options`."""
    value = decoded(options)
    pairs = [
        [*one.items()] if isinstance(one, Mapping) else [one]
        for one in (value if isinstance(value, list) else ())
    ]
    is_labelled = pairs and all(
        len(pair) == 1
        and isinstance(pair[0], list | tuple)
        and len(pair[0]) == 2
        and re.fullmatch("[A-Za-z]", str(pair[0][0]))
        for pair in pairs
    )
    return dict(pair[0] for pair in pairs) if is_labelled else value


def last_message(value: Any, *roles: str) -> Any:
    """Returns the last message of the user (or of `roles`); any other value is unchanged."""
    messages = decoded(value)
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        return value
    said = [
        one.get("content", one.get("value"))
        for one in messages
        if one.get("role", one.get("from")) in (roles or ("user", "human"))
    ][-1:]
    if said and isinstance(said[0], list):  # in parts
        return "".join(str(part.get("text", "")) for part in said[0] if isinstance(part, Mapping))
    return said[0] if said else None


def text_of(value: Any) -> str:
    """A text or a number as text, a boolean as yes or no; "" for anything else, also NaN."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).strip() if isinstance(value, str | int | float) and value == value else ""


def objects_of(value: Any) -> list[dict[str, Any]]:
    """The objects of a list, or of a table as columns: `{"title": [...], "text": [...]}`."""
    value = decoded(value)
    if isinstance(value, Mapping):
        if not value or not all(isinstance(column, list) for column in value.values()):
            return [dict(value)]
        return [
            dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=False)
        ]
    several = value if isinstance(value, list) else ()
    return [dict(one) for one in several if isinstance(one, Mapping)]


def rows_within(row: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """The rows that a row holds at `path` (`paragraphs.qas`), each with the fields around it; the
    row itself if it holds none there."""
    name, _, rest = path.partition(".")
    inner = objects_of(row[name]) if isinstance(row.get(name), list | dict) else []
    if not inner or (rest and not any(rest in one for one in inner)):
        return [dict(row)]
    around = {key: value for key, value in row.items() if key != name}
    parts = [{**around, **one} for one in inner]
    return [one for part in parts for one in rows_within(part, rest)] if rest else parts


def _first(row: Mapping[str, Any], names: Iterable[str]) -> tuple[str, Any] | None:
    """The first name that has a value, and the value."""
    values = ((name, value_at(row, name)) for name in names)
    return next((one for one in values if not isinstance(one[1], bool | None)), None)
