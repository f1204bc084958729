"""Checks of request fields that dialects share."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import InputError

MAX_CHOICES = 128
_REFUSED = {
    "truncate_prompt_tokens": "it would cut the prompt where nobody sees it",
    "use_beam_search": "beams are not sampled",
    "best_of": "the answers that are thrown away would be lost",
}


def refuse_inexact(body: dict[str, Any]) -> None:
    """
    Raises:
        InputError: a field would make the record inexact.
    """
    for name, reason in _REFUSED.items():
        if body.get(name) not in (None, False):
            raise bad(name, f"is not possible here: {reason}")


def objects(body: dict[str, Any], name: str, *, needed: bool = False) -> list[dict[str, Any]]:
    """The list of objects in field `name`, empty without one.

    Raises:
        InputError: it is no such list, or is empty though `needed`.
    """
    values = body.get(name)
    if not needed and not values:
        return []
    if not isinstance(values, list) or (needed and not values):
        raise bad(name, "must be a list of at least one" if needed else "must be a list")
    if not all(isinstance(value, dict) for value in values):
        raise bad(name, "must hold objects only")
    return values


def choices(body: dict[str, Any]) -> int:
    """Field `n`."""
    count_ = count(body, "n") or 1
    if count_ > MAX_CHOICES:
        raise bad("n", f"must be at most {MAX_CHOICES}")
    return count_


def count(body: dict[str, Any], name: str) -> int | None:
    """The whole number of at least 1 in field `name`, None without one.

    Raises:
        InputError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad(name, "must be a whole number of at least 1")
    return value


def bad(name: str, what: str) -> InputError:
    """The error that says what is wrong with field `name`."""
    return InputError(f"{name} {what}.", place=name)


def string(holder: dict[str, Any], name: str, place: str = "") -> str:
    """The text in field `name` of `holder`, which stands at `place` in the request.

    Raises:
        InputError: it is none.
    """
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad(_path(place, name), "must be a text")
    return value


def mapping(holder: dict[str, Any], name: str, place: str = "") -> dict[str, Any]:
    """The object in field `name` of `holder`, which stands at `place`; empty without one.

    Raises:
        InputError: it is something else.
    """
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad(_path(place, name), "must be an object")
    return value


def boolean(holder: dict[str, Any], name: str, place: str = "") -> bool | None:
    """The truth value in field `name` of `holder`, which stands at `place`; None without one.

    Raises:
        InputError: it is something else.
    """
    value = holder.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(_path(place, name), "must be true or false")
    return value


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
