"""Arguments of tool calls: text in chats, objects in Anthropic's messages API. Pure.

An agent gets the object and sends it back, but the history must hold the text that the model wrote,
with its exact spaces and numbers. So the text of each call is kept for the attempt.
"""

from __future__ import annotations

from typing import Any

import orjson

from .base import Memory

_NOT_AN_OBJECT = "arguments"


class Arguments:
    """The arguments of all tool calls of one attempt, kept in `memory`."""

    def __init__(self, memory: Memory) -> None:
        self._texts: dict[str, str] = memory.setdefault("arguments", {})

    def keep(self, call_id: str, arguments: str) -> None:
        """Keeps the text of a call that is sent to an agent."""
        self._texts[call_id] = arguments

    def given(self, call_id: str, value: dict[str, Any]) -> str:
        """Returns the model's text for `value`, which an agent sent back, or else `value` as
        JSON."""
        kept = self._texts.get(call_id)
        if kept is not None and _same(as_object(kept), value):
            return kept
        return orjson.dumps(value).decode()


def as_object(arguments: str) -> dict[str, Any]:
    """Returns arguments as an object; anything else is wrapped in one, so that nothing is
    hidden."""
    try:
        value = orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        value = arguments
    return value if isinstance(value, dict) else {_NOT_AN_OBJECT: arguments}


def as_json(arguments: str) -> str:
    """Returns `as_object` as text, which is the model's own if that is an object."""
    if arguments.strip() and is_object(arguments):
        return arguments
    return orjson.dumps(as_object(arguments)).decode()


def is_object(arguments: str) -> bool:
    """Returns whether arguments are an object as JSON, or nothing, which stands for an empty
    one."""
    return as_object(arguments) != {_NOT_AN_OBJECT: arguments}


def _same(one: Any, other: Any) -> bool:
    """Returns whether two JSON values are equal; 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
