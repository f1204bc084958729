"""How deeply the JSON of agents and engines may nest: it is written again inside other objects, and
JSON writers have limits."""

from __future__ import annotations

from typing import Any

import orjson

MAX_NESTING = 100
_MOST_WRITTEN = 254
"""Levels that `orjson.dumps` writes; it raises for more (orjson's README)."""


def nests_too_deeply(data: bytes, value: Any) -> bool:
    """Returns whether `value`, parsed from `data` by orjson, nests deeper than MAX_NESTING levels.

    Writing it inside so many lists that no more than MAX_NESTING levels are left is faster than to
    walk through it: answers with logprobs have a hundred objects.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False
    for _ in range(_MOST_WRITTEN - MAX_NESTING):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False
