"""Llama 3: `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it."""

from __future__ import annotations

from .calls import ParsedCall, ParsedCalls, Tools, found, json_at, parsed_call


def parse(text: str, tools: Tools) -> ParsedCalls | None:
    """Returns the calls in `text`; drops the text around them, as Llama's own parsers do."""
    calls: list[ParsedCall | None] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, end = json_at(text, at)
        except ValueError:
            return None
        calls.append(_call(value))
        at = text.find("{", end)
    return found(calls)


def _call(value: dict[str, object]) -> ParsedCall | None:
    for name in ("arguments", "parameters"):
        if name in value:
            return parsed_call(value.get("name"), value[name])
    return None
