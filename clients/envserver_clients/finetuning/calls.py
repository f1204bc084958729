"""Reads tool calls in what a model wrote, and checks them against the tools that were offered.

Chat templates write calls as JSON objects with a name and arguments (`<tool_call>{...}`, a list
after `[TOOL_CALLS]`, bare objects); calls in other forms are not recognised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import exceptions, validators

from .conversation import Tools

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]


def calls_in(text: str) -> list[Call]:
    """Returns the calls in a text, in order."""
    decoder = json.JSONDecoder()
    found: list[Call] = []
    place = text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            call = _call(value)
            found += [call] if call else []
            end = max(end, place + 1)
        place = text.find("{", end)
    return found


def are_valid(calls: list[Call], tools: Tools | None) -> bool:
    """Returns whether there is a call, and all name an offered tool with arguments that fit its
    JSON schema. Without tools, any call is valid."""
    if tools is None:
        return bool(calls)
    schemas = {one["name"]: one.get("parameters") or {} for one in map(_function, tools) if one}
    return bool(calls) and all(
        call.name in schemas and _fits(call.arguments, schemas[call.name]) for call in calls
    )


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    arguments = next((value[name] for name in _ARGUMENTS if name in value), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
        return None
    return Call(value["name"], arguments)


def _function(tool: Any) -> dict[str, Any] | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function if isinstance(function, dict) and "name" in function else None


def _fits(arguments: Mapping[str, Any], schema: Any) -> bool:
    try:
        kind = validators.validator_for(schema)
        return bool(kind(schema).is_valid(arguments))
    except exceptions.SchemaError:
        return True  # the tool's own fault
