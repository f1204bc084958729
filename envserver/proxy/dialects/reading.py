"""Field checks that the dialects share."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import InputError


def objects(body: dict[str, Any], name: str, *, needed: bool = False) -> list[dict[str, Any]]:
    """Returns the list of objects in field `name`, or [].
    Raises InputError: it is not such a list, or is empty though `needed`.
    """
    values = body.get(name)
    if not needed and not values:
        return []
    if not isinstance(values, list) or (needed and not values):
        raise bad(name, "must be a list of at least one item" if needed else "must be a list")
    if not all(isinstance(value, dict) for value in values):
        raise bad(name, "must only hold objects")
    return values


def count(body: dict[str, Any], name: str) -> int | None:
    """Returns the positive integer in field `name`, or None.
    Raises InputError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad(name, "must be a whole number of at least 1")
    return value


def bad(name: str, what: str) -> InputError:
    """Returns the error about field `name`."""
    return InputError(f"{name} {what}.", place=name)


def string(holder: dict[str, Any], name: str, place: str = "") -> str:
    """Returns the string in field `name` of `holder`, which is at `place` in the request.
    Raises InputError: it is not a string.
    """
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad(_path(place, name), "must be a text")
    return value


def mapping(holder: dict[str, Any], name: str, place: str = "") -> dict[str, Any]:
    """Returns the object in field `name` of `holder`, which is at `place`, or {}.
    Raises InputError: it is something else.
    """
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad(_path(place, name), "must be an object")
    return value


def boolean(holder: dict[str, Any], name: str, place: str = "") -> bool | None:
    """Returns the boolean in field `name` of `holder`, which is at `place`, or None.
    Raises InputError: it is something else.
    """
    value = holder.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(_path(place, name), "must be true or false")
    return value


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
