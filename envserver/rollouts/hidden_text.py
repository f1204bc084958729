"""Keeps a task's hidden part out of texts about a failure. Pure.

A scorer knows the hidden part, and its exceptions quote what they stumbled over. What is struck:
every string and number of the hidden part that is long enough not to be a common word, also as
Python and JSON write it, and each longer line of its texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

STRUCK = "[hidden]"
_SHORTEST = 4
_SHORTEST_LINE = 8
_MOST_PIECES = 5000


def without_hidden(text: str, hidden: dict[str, Any]) -> str:
    """Returns `text` without the values of `hidden`."""
    pieces: set[str] = set()
    for value in _values(hidden):
        if len(pieces) >= _MOST_PIECES:
            return STRUCK  # too much to look for: nothing is shown
        pieces.update(_written(value))
    for piece in sorted(pieces, key=len, reverse=True):
        text = text.replace(piece, STRUCK)
    return text


def _values(value: Any) -> Iterator[str]:
    """Yields the strings and numbers of a JSON-like value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode(errors="replace")
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _values(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _values(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield repr(value)


def _written(value: str) -> Iterator[str]:
    """Yields the ways in which a message may hold a value."""
    lines = [line.strip() for line in value.splitlines()] if "\n" in value else []
    for shortest, part in [(_SHORTEST, value), *((_SHORTEST_LINE, line) for line in lines)]:
        if len(part) >= shortest:
            yield part
            yield repr(part)[1:-1]
            yield json.dumps(part)[1:-1]
