"""Llama 3: `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it."""

from __future__ import annotations

from .calls import Called, Found, Tools, called, found, json_at


def parse(text: str, tools: Tools) -> Found | None:
    """The calls in `text`; what stands around them is dropped, as by Llama's own parsers."""
    calls: list[Called | None] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, end = json_at(text, at)
        except ValueError:
            return None
        calls.append(_call(value))
        at = text.find("{", end)
    return found(calls)


def _call(value: dict[str, object]) -> Called | None:
    for name in ("arguments", "parameters"):
        if name in value:
            return called(value.get("name"), value[name])
    return None
