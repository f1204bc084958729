"""Reads messages and tools of OpenAI's chat API: only what is listed here goes on. Pure."""

from __future__ import annotations

from typing import Any

from envserver_records.records import Message

from .media import media_part
from .reading import bad, mapping, objects, string

_FIELDS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
)
"""Clients send more back (annotations, parsed values, costs), which no engine reads."""
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts, with the field that holds the text."""


def chat_messages(body: dict[str, Any]) -> list[Message]:
    """Returns the messages in field `messages`.

    Raises:
        InputError: a message or part is malformed or not supported; `place` names it.
    """
    given = objects(body, "messages", needed=True)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def chat_tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools in field `tools`.

    Raises:
        InputError: a tool is not one of the agent's own functions.
    """
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(objects(body, "tools"))]


def _message(message: Message, place: str) -> Message:
    kept = {name: message[name] for name in _FIELDS if name in message}
    if isinstance(kept.get("content"), list):
        parts = enumerate(kept["content"])
        kept["content"] = [_part(part, f"{place}.content[{index}]") for index, part in parts]
    elif kept.get("content") is not None:
        string(kept, "content", place)
    return kept


def _part(part: Any, place: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise bad(place, "must be an object")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXTS:
        return {"type": kind, _TEXTS[kind]: string(part, _TEXTS[kind], place)}
    media = media_part(part, place)
    if media is None:
        raise bad(f"{place}.type", f"{str(kind)[:80]!r} is not supported")
    return media


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "function"):
        raise bad(
            f"{place}.type",
            f"{str(kind)[:80]!r} is not supported: all tools must be the agent's own functions",
        )
    function = mapping(tool, "function", place)
    string(function, "name", f"{place}.function")
    kept = {name: function[name] for name in _TOOL_FIELDS if name in function}
    return {"type": "function", "function": kept}
