"""Types shared by all formats of tool calls: the calls, and the text before them."""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec

Tools = list[dict[str, Any]]


class ParsedCall(msgspec.Struct, frozen=True):
    """One call. `arguments` is JSON."""

    name: str
    arguments: str

    def message(self) -> dict[str, Any]:
        """Returns the call as an entry of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


class ParsedCalls(msgspec.Struct, frozen=True):
    """The calls in a text, at least one, and the text before them."""

    calls: list[ParsedCall]
    content: str = ""


def parsed_call(name: Any, arguments: Any) -> ParsedCall | None:
    """Returns a call; None if the name or the arguments are invalid."""
    if not isinstance(name, str) or not name:
        return None
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


def found(calls: list[ParsedCall | None], content: str = "") -> ParsedCalls | None:
    """Returns all of `calls`; None if there are none or one of them is invalid."""
    sound = [call for call in calls if call is not None]
    return ParsedCalls(sound, content) if sound and len(sound) == len(calls) else None


def parameters_of(tools: Tools, name: str) -> dict[str, Any]:
    """Returns the schemas of the parameters of the tool called `name`."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def json_at(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at `start`, and its end.
    Raises ValueError: there is none.
    """
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deep") from None
