"""Cleans what a rollout returned: limited depth and size, no lone surrogates or NUL, 64-bit
integers.

A value that is clean already comes back equal; `changes` says what was changed. Pure.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

MAX_DEPTH = 100
"""Deeper lists and objects become CUT."""
MAX_TEXT_CHARACTERS = 1_000_000
"""The rest of a longer text is cut off."""
MAX_CHARACTERS = 8_000_000
"""Size of the whole value; beyond it texts are empty, and lists and objects end."""
CUT = "[cut off]"

_ITEM_COST = 8
_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**64 - 1


Change = Literal["cut", "replaced"]
"""`cut`: too deep or too large. `replaced`: a character or an integer that cannot be held."""


class Cleaned(NamedTuple):
    value: Any
    changes: frozenset[Change]


def clean(value: Any, max_characters: int = MAX_CHARACTERS) -> Cleaned:
    """Returns `value` cleaned. What JSON has no form for stays as it is.

    An item of a list or an object counts 8 characters beside its text.
    """
    cleaner = _Cleaner(max_characters)
    return Cleaned(cleaner.clean(value, MAX_DEPTH), frozenset(cleaner.changes))


def clean_text(text: str) -> str:
    """Replaces lone surrogates and NUL, which UTF-8 and databases cannot hold."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if text.isascii():
        return text
    # Two halves beside each other are the one character that they stand for.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Cleaner:
    def __init__(self, max_characters: int) -> None:
        self._left = max_characters
        self.changes: set[Change] = set()

    def clean(self, value: Any, depth: int) -> Any:
        self._left -= _ITEM_COST
        match value:
            case str():
                return self._text(value)
            case bool() | None | float():
                return value
            case int():
                return self._integer(value)
            case list() | tuple() | dict() if depth == 0:
                self.changes.add("cut")
                return CUT
            case list() | tuple():
                return [self.clean(part, depth - 1) for part in value if self._has_room()]
            case dict():
                return {
                    self._text(key) if isinstance(key, str) else key: self.clean(part, depth - 1)
                    for key, part in value.items()
                    if self._has_room()
                }
        return value

    def _has_room(self) -> bool:
        if self._left <= 0:
            self.changes.add("cut")
        return self._left > 0

    def _integer(self, value: int) -> int | str:
        if _LEAST_INTEGER <= value <= _MOST_INTEGER:
            return value
        self.changes.add("replaced")
        return f"{value:#x}"

    def _text(self, text: str) -> str:
        size = max(0, min(self._left, MAX_TEXT_CHARACTERS))
        self._left -= min(len(text), size)
        if len(text) > size:
            self.changes.add("cut")
            text = text[:size] + CUT
        clean = clean_text(text)
        if clean != text:
            self.changes.add("replaced")
        return clean
