"""Cleans what a rollout returned, so that everything behind the border can hold it. Pure.

In: any JSON-like value, as a model's code may have made it. Out: a value of limited depth and size,
whose texts have no lone surrogates and no NUL, and whose integers fit 64 bits. A value that is
clean already comes back equal.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 100
"""Deeper lists and objects become CUT."""
MAX_TEXT_CHARACTERS = 1_000_000
"""The rest of a longer text is cut off."""
MAX_CHARACTERS = 8_000_000
"""Size of the whole value; beyond it texts are empty, and lists and objects end."""
CUT = "[cut off]"

_ITEM_COST = 8
_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**64 - 1


def cleaned(value: Any) -> Any:
    """Returns `value` cleaned. What JSON has no form for stays as it is."""
    return _Cleaner().clean(value, MAX_DEPTH)


def clean_text(text: str) -> str:
    """Replaces lone surrogates and NUL, which UTF-8 and databases cannot hold."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if text.isascii():
        return text
    # Two halves beside each other are the one character that they stand for.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Cleaner:
    """Counts what is left of the size while it walks through a value."""

    def __init__(self) -> None:
        self._left = MAX_CHARACTERS

    def clean(self, value: Any, depth: int) -> Any:
        self._left -= _ITEM_COST
        match value:
            case str():
                return self._text(value)
            case bool() | None | float():
                return value
            case int():
                return value if _LEAST_INTEGER <= value <= _MOST_INTEGER else f"{value:#x}"
            case list() | tuple() | dict() if depth == 0:
                return CUT
            case list() | tuple():
                return [self.clean(part, depth - 1) for part in value if self._left > 0]
            case dict():
                return {
                    self._text(key) if isinstance(key, str) else key: self.clean(part, depth - 1)
                    for key, part in value.items()
                    if self._left > 0
                }
        return value

    def _text(self, text: str) -> str:
        size = max(0, min(self._left, MAX_TEXT_CHARACTERS))
        self._left -= min(len(text), size)
        return clean_text(text if len(text) <= size else text[:size] + CUT)
