"""Arguments of tool calls: text in chats, objects in Anthropic's messages API.

An agent gets the object and sends it back; what stands in the history must be the text that the
model wrote, with its spaces and numbers. So the text of each call is kept for the attempt. Pure.
"""

from __future__ import annotations

from typing import Any

import orjson

from .base import Memory

_NOT_AN_OBJECT = "arguments"


class Arguments:
    """The arguments of all tool calls of one attempt; they stand in `memory`."""

    def __init__(self, memory: Memory) -> None:
        self._texts: dict[str, str] = memory.setdefault("arguments", {})

    def keep(self, call_id: str, arguments: str) -> None:
        """Keeps the text of a call that an agent is given."""
        self._texts[call_id] = arguments

    def given(self, call_id: str, value: dict[str, Any]) -> str:
        """The text behind `value`, which an agent sent back: its own where that is not known."""
        kept = self._texts.get(call_id)
        if kept is not None and _same(as_object(kept), value):
            return kept
        return orjson.dumps(value).decode()


def as_object(arguments: str) -> dict[str, Any]:
    """What an agent is given; what is no object stands in one, so that nothing is hidden."""
    try:
        value = orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        value = arguments
    return value if isinstance(value, dict) else {_NOT_AN_OBJECT: arguments}


def as_json(arguments: str) -> str:
    """`as_object` as text; the model's own where it is an object."""
    value = as_object(arguments)
    wrapped = value == {_NOT_AN_OBJECT: arguments}
    return orjson.dumps(value).decode() if wrapped or not arguments.strip() else arguments


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values mean the same; 1 and 1.0 do, 1 and true do not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
