"""Parses a hostile program's return values, strictly, into exact built-in types that hold no code.

null, true, false, "text", 12        themselves (integers of at most 18 digits)
["i", "-1f"]                         an integer, in base 16
["f", "0x1.8p+1"]                    a float, as `float.hex` writes it
["c", "0x0.0p+0", "inf"]             a complex number
["b", "00ff"]                        bytes
["u", "eda080"]                      a text with halves of characters, as UTF-8
["l", [...]]                         a list; t: tuple, s: set, z: frozenset, q: deque
["d", [key, value, key, value]]      a dict
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NoReturn

MAX_DEPTH = 50
MAX_NODES = 100_000
MAX_TEXT = 256 * 1024
"""Characters of one call's JSON."""
MAX_EQUAL_HASHES = 64
"""Elements of a set with the same hash; more would make it slow on purpose."""

_HEX_INTEGER = re.compile(r"-?[0-9a-f]{1,20000}")
_HEX_FLOAT = re.compile(r"-?(?:0x[01]\.[0-9a-f]{1,14}p[+-][0-9]{1,4}|inf)|nan")


class BadValue(Exception):
    """The text is not what the harness writes for a value of the known types."""


def read_json(text: str) -> Any:
    """A line of the harness, whose values are still shapes."""
    if len(text) > MAX_TEXT + 1000:
        raise BadValue("the line is too long")
    try:
        return json.loads(text, parse_int=_short, parse_float=_refused, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise BadValue("the line is not JSON of the harness") from error


def read_value(shape: Any) -> Any:
    return _Reader().read(shape, MAX_DEPTH)


def checked_hashes(items: Iterable[Hashable]) -> None:
    hashes = Counter(map(hash, items))
    if hashes and max(hashes.values()) > MAX_EQUAL_HASHES:
        raise BadValue("too many elements have the same hash")


class _Reader:
    def __init__(self) -> None:
        self._left = MAX_NODES

    def read(self, shape: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth < 0:
            raise BadValue("the value is too large or too deep")
        try:
            return self._value(shape, depth)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadValue("a part of the value cannot be read") from error

    def _value(self, shape: Any, depth: int) -> Any:
        match shape:
            case None | bool() | int() | str():
                return shape
            case ["i", str(digits)] if _HEX_INTEGER.fullmatch(digits):
                return int(digits, 16)
            case ["f", str(number)]:
                return _float(number)
            case ["c", str(real), str(imaginary)]:
                return complex(_float(real), _float(imaginary))
            case ["b", str(digits)]:
                return bytes.fromhex(digits)
            case ["u", str(digits)]:
                return bytes.fromhex(digits).decode("utf-8", "surrogatepass")
            case [str(tag), list(items)] if tag in _MAKERS:
                return _MAKERS[tag]([self.read(item, depth - 1) for item in items])
        raise BadValue("the value has no known shape")


def made_set(items: list[Any]) -> set[Any]:
    checked_hashes(items)
    return set(items)


def _dict(items: list[Any]) -> dict[Any, Any]:
    checked_hashes(items[::2])
    return dict(zip(items[::2], items[1::2], strict=True))


_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "s": made_set,
    "z": lambda items: frozenset(made_set(items)),
    "q": deque,
    "d": _dict,
}


def _float(text: str) -> float:
    if not _HEX_FLOAT.fullmatch(text):
        raise BadValue("this is not a float")
    return float.fromhex(text)


def _short(digits: str) -> int:
    if len(digits) > 19:
        raise ValueError("long integers are written in base 16")
    return int(digits)


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is written otherwise")
