"""Checks for the values of request fields: types and bounds. Pure.

A check is called with a value (never None) and its place, and raises InputError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson
from envserver_records.errors import InputError

from ...tokens.prepare import RESERVED
from .reading import bad

Check = Callable[[Any, str], None]

KIBIBYTE = 1024
_INT64 = 2**63
LARGEST_INT32 = 2**31 - 1


def whole(least: int, most: int) -> Check:
    """Returns the check for a whole number in [least, most]."""
    limit = "" if most >= LARGEST_INT32 else f" and at most {most}"

    def check(value: Any, place: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise bad(place, f"must be a whole number of at least {least}{limit}")

    return check


def number(least: float, most: float) -> Check:
    """Returns the check for a finite number in [least, most]."""

    def check(value: Any, place: str) -> None:
        if (
            type(value) not in (int, float)
            or not least <= value <= most
            or not math.isfinite(value)
        ):
            raise bad(place, f"must be a number from {least:g} to {most:g}")

    return check


def flag(value: Any, place: str) -> None:
    """Checks that `value` is true or false."""
    if not isinstance(value, bool):
        raise bad(place, "must be true or false")


def text(longest: int) -> Check:
    """Returns the check for a string of at most `longest` characters."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str):
            raise bad(place, "must be a text")
        if len(value) > longest:
            raise bad(place, f"must have at most {longest} characters")

    return check


def items(most: int, each: Check | None = None) -> Check:
    """Returns the check for a list of at most `most` items that pass `each`."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            raise bad(place, "must be a list")
        if len(value) > most:
            raise bad(place, f"must have at most {most} items")
        for index, item in enumerate(value if each else ()):
            assert each is not None
            each(item, f"{place}[{index}]")

    return check


def mapping(size: int) -> Check:
    """Returns the check for an object of at most `size` bytes as JSON."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise bad(place, "must be an object")
        if len(orjson.dumps(value)) > size:
            raise bad(place, f"must have at most {size} bytes as JSON")

    return check


def kept(holder: Mapping[str, Any], checks: Mapping[str, Check], place: str) -> dict[str, Any]:
    """Returns the fields of `holder` that `checks` names, checked, and leaves out all others.

    A field that is null stays null.
    Raises InputError: a field fails its check.
    """
    fields = {}
    for name, value in holder.items():
        check = checks.get(name)
        if check is not None:
            if value is not None:
                check(value, f"{place}.{name}")
            fields[name] = value
    return fields


def refuse_others(holder: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Raises InputError: `holder` has a field that is not in `known`."""
    for name in holder:
        if name not in known:
            raise bad(f"{place}.{name[:80]}", "is not supported")


def template_variables(value: Any, place: str) -> None:
    """Checks variables for the chat template: none has the name of an argument of the engine."""
    _VARIABLES(value, place)
    for name in value:
        if name in RESERVED:
            raise bad(f"{place}.{name}", "is not a variable that an agent may set: leave it out")


def either(*checks: Check) -> Check:
    """Returns the check for a value that passes one of `checks`; the last one's error counts."""

    def check(value: Any, place: str) -> None:
        for one in checks[:-1]:
            try:
                return one(value, place)
            except InputError:
                continue
        return checks[-1](value, place)

    return check


def instance(*types: type, what: str) -> Check:
    """Returns the check for a value of one of `types`; `what` names them in its error."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, types):
            raise bad(place, f"must be {what}")

    return check


def one_of(*values: Any) -> Check:
    """Returns the check for one of `values`, which are strings or whole numbers."""

    def check(value: Any, place: str) -> None:
        if not any(type(value) is type(one) and value == one for one in values):
            raise bad(place, f"must be {' or '.join(map(str, values))}")

    return check


an_object = instance(dict, what="an object")
NAME = text(KIBIBYTE)
LONG_TEXT = text(64 * KIBIBYTE * KIBIBYTE)
"""As long as a request may be."""
EFFORT = text(64)
SEED = whole(-_INT64, _INT64 - 1)
TOKENS = whole(1, LARGEST_INT32)
TOKEN_ID = whole(0, LARGEST_INT32)
MAX_CHOICES = 128
"""Answers to one request."""
CHOICES = whole(1, MAX_CHOICES)
TOP_LOGPROBS = whole(0, 20)
STOP_TEXTS = items(64, text(KIBIBYTE))
STOP = either(text(KIBIBYTE), STOP_TEXTS)
_VARIABLES = mapping(16 * KIBIBYTE)
