"""Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import re

from .calls import ParsedCall, ParsedCalls, Tools, found, json_at, parsed_call

_OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse(text: str, tools: Tools) -> ParsedCalls | None:
    """Returns the calls in `text`; None if one is malformed, so that all of it is plain text."""
    if _OPEN not in text:
        return None
    calls = [_call(match.group(1)) for match in _CALL.finditer(text)]
    return found(calls, text[: text.index(_OPEN)])


def _call(text: str) -> ParsedCall | None:
    text = text.strip()
    try:
        value, end = json_at(text, 0)
    except ValueError:
        return None
    if end != len(text) or not isinstance(value, dict) or "arguments" not in value:
        return None
    return parsed_call(value.get("name"), value["arguments"])
