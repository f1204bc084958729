"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or since 2025
`[TOOL_CALLS]NAME[ARGS]{...}` for each call, where `[ARGS]` may be missing.
"""

from __future__ import annotations

from .calls import ParsedCall, ParsedCalls, Tools, found, json_at, parsed_call

_OPEN = "[TOOL_CALLS]"


def parse(text: str, tools: Tools) -> ParsedCalls | None:
    """Returns the calls in `text`."""
    content, *parts = text.split(_OPEN)
    if not parts:
        return None
    calls: list[ParsedCall | None] = []
    for part in parts:
        calls += _list(part) if part.lstrip().startswith("[") else [_named(part)]
    return found(calls, content)


def _list(part: str) -> list[ParsedCall | None]:
    try:
        values, _ = json_at(part.lstrip(), 0)
    except ValueError:
        return [None]
    return [
        parsed_call(value.get("name"), value.get("arguments")) if isinstance(value, dict) else None
        for value in values
    ]


def _named(part: str) -> ParsedCall | None:
    start = part.find("{")
    if start < 0:
        return None
    name = part[:start].removesuffix("[ARGS]").partition("[CALL_ID]")[0].strip()
    try:
        arguments, _ = json_at(part, start)
    except ValueError:
        return None
    return parsed_call(name, arguments)
