"""How deeply the JSON of agents and engines may nest: it is written again inside other objects, and
JSON writers have limits."""

from __future__ import annotations

from typing import Any

MAX_NESTING = 100


def nests_too_deeply(data: bytes, value: Any) -> bool:
    """Returns whether `value`, parsed from `data`, nests deeper than MAX_NESTING levels."""
    return data.count(b"[") + data.count(b"{") > MAX_NESTING and _is_deeper(value, MAX_NESTING)


def _is_deeper(value: Any, levels: int) -> bool:
    # Level by level. Exact type checks are fast: JSON has no subclasses, and a prompt may hold
    # 100 000 ids.
    level: list[Any] = [value]
    for _ in range(levels):
        level = [
            each
            for one in level
            for each in (one.values() if type(one) is dict else one)
            if type(each) is dict or type(each) is list
        ]
        if not level:
            return False
    return True
