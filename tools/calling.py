"""Runs the tool calls of a model: strict about the arguments, never raises for what a model wrote.

In: one tool call in OpenAI's shape. Out: the text of the tool message, and whether the call was in
order. Arguments are strict JSON (no duplicate keys, no NaN), an object, valid against the tool's
own JSON schema. What a tool itself raises is a bug of the tool and passes through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from jsonschema import Draft202012Validator

MAX_RESULT_CHARACTERS = 4000
CUT_MARKER = "\n[cut: the result is longer]"


class ToolError(Exception):
    """The call cannot be carried out; the message is for the model."""


@dataclass(frozen=True)
class Tool:
    """A function tool: its OpenAI description, and the function that gets the arguments by name."""

    description: dict[str, Any]
    function: Callable[..., str]

    @property
    def name(self) -> str:
        return str(self.description["function"]["name"])

    @cached_property
    def validator(self) -> Draft202012Validator:
        return Draft202012Validator(self.description["function"]["parameters"])


@dataclass(frozen=True)
class ToolResult:
    """What came of a call: its text for the model, and whether it was in order."""

    text: str
    ok: bool


def toolbox(*tools: Tool) -> dict[str, Tool]:
    """Tools by their names."""
    return {tool.name: tool for tool in tools}


def run_tool_call(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> ToolResult:
    """Runs `call` with the tool that it names.

    Returns:
        The result, cut at 4000 characters; "Error: ..." where the call is not in order.
    """
    try:
        tool, arguments = checked_call(tools, call)
        text = tool.function(**arguments)
    except ToolError as error:
        return ToolResult(f"Error: {error}", ok=False)
    return ToolResult(cut(text), ok=True)


def checked_call(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> tuple[Tool, dict[str, Any]]:
    """The tool that `call` names and its arguments.

    Raises:
        ToolError: there is no such tool, or the arguments break its schema.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ToolError("a tool call must hold a function.")
    name = function.get("name")
    if not isinstance(name, str) or name not in tools:
        raise ToolError(f"there is no tool {name!r}; there are: {', '.join(tools)}.")
    tool = tools[name]
    arguments = _strict_object(function.get("arguments"))
    broken = next(iter(tool.validator.iter_errors(arguments)), None)
    if broken is not None:
        raise ToolError(f"the arguments of {name} are not valid: {broken.message[:300]}")
    return tool, arguments


def cut(text: str) -> str:
    """`text`, at most 4000 characters and the marker that says so."""
    if len(text) <= MAX_RESULT_CHARACTERS:
        return text
    return text[:MAX_RESULT_CHARACTERS] + CUT_MARKER


def _strict_object(source: object) -> dict[str, Any]:
    if not isinstance(source, str):
        raise ToolError("the arguments must be a JSON object, as a string.")
    try:
        value = json.loads(source, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ToolError("the arguments must be a JSON object.")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands there twice")
    return value
