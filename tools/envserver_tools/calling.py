"""Runs the tool calls of a model: strict about the arguments, never raises for what a model wrote.

In: a tool's name and its arguments, bare or as one tool call in OpenAI's shape. Out: the text for
the model, and whether the call was in order. JSON is strict (no duplicate keys, no NaN, no half
characters), the arguments an object, valid against the tool's own JSON schema. What a tool raises
itself, but ToolError, is a bug of the tool and passes through.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
    """A function tool.

    Args:
        description: in OpenAI's shape.
        function: gets the arguments by name; plain or `async`. It may raise ToolError.
        max_characters: what is longer is cut.
    """

    description: dict[str, Any]
    function: Callable[..., str | Awaitable[str]]
    max_characters: int = MAX_RESULT_CHARACTERS

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


def function_tool(
    name: str, does: str, properties: dict[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
    """A function tool in OpenAI's shape; nothing but `properties` may be given to it."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": does,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(required),
                "additionalProperties": False,
            },
        },
    }


def toolbox(*tools: Tool) -> dict[str, Tool]:
    """Tools by their names."""
    return {tool.name: tool for tool in tools}


def descriptions(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """What a chat completion gets as `tools`."""
    return [tool.description for tool in tools]


def run_tool_call(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> ToolResult:
    """Runs `call` with the tool that it names, which must be a plain function.

    Returns:
        The result, cut at the tool's limit; "Error: ..." where the call is not in order.
    """
    try:
        tool, arguments = checked_call(tools, call)
        text = tool.function(**arguments)
    except ToolError as error:
        return refused(error)
    if not isinstance(text, str):
        if inspect.iscoroutine(text):
            text.close()
        raise TypeError(f"{tool.name} is asynchronous: await call_tool(tools, call)")
    return ToolResult(cut(text, tool.max_characters), ok=True)


async def call_tool(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> ToolResult:
    """`run_tool_call` for tools of both kinds."""
    try:
        tool, arguments = checked_call(tools, call)
    except ToolError as error:
        return refused(error)
    return await _called(tool, arguments)


async def use_tool(tools: Mapping[str, Tool], name: object, arguments: object) -> ToolResult:
    """`call_tool`, with arguments that are an object already."""
    try:
        tool, valid = checked_arguments(tools, name, arguments)
    except ToolError as error:
        return refused(error)
    return await _called(tool, valid)


async def _called(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    try:
        outcome = tool.function(**arguments)
        text = await outcome if inspect.isawaitable(outcome) else outcome
    except ToolError as error:
        return refused(error)
    return ToolResult(cut(str(text), tool.max_characters), ok=True)


def refused(error: ToolError) -> ToolResult:
    """The result of a call that cannot be carried out."""
    return ToolResult(cut(f"Error: {error}"), ok=False)


def checked_call(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> tuple[Tool, dict[str, Any]]:
    """The tool that `call` names and its arguments.

    Raises:
        ToolError: there is no such tool, or the arguments break its schema.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ToolError("a tool call must hold a function.")
    tool = _named(tools, function.get("name"))
    source = function.get("arguments")
    if not isinstance(source, str):
        raise ToolError("the arguments must be a JSON object, as a string.")
    try:
        arguments = json.loads(source, cls=StrictDecoder)
        check_characters(source, arguments)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {error}") from error
    return checked_arguments(tools, tool.name, arguments)


def checked_arguments(
    tools: Mapping[str, Tool], name: object, arguments: object
) -> tuple[Tool, dict[str, Any]]:
    """The tool of that name and its valid arguments. Raises like `checked_call`."""
    tool = _named(tools, name)
    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be a JSON object.")
    try:
        broken = next(iter(tool.validator.iter_errors(arguments)), None)
    except RecursionError:
        raise ToolError(f"the arguments of {tool.name} are nested too deeply.") from None
    if broken is not None:
        raise ToolError(f"the arguments of {tool.name} are not valid: {_short(broken.message)}")
    return tool, arguments


def cut(text: str, limit: int = MAX_RESULT_CHARACTERS) -> str:
    """`text`, at most `limit` characters and the marker that says so."""
    return text if len(text) <= limit else text[:limit] + CUT_MARKER


class StrictDecoder(json.JSONDecoder):
    """JSON as the standard has it: ValueError for NaN, numbers out of range and duplicate keys."""

    def __init__(self) -> None:
        super().__init__(
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_no_duplicates,
        )


def check_characters(source: str, value: object) -> None:
    """Raises ValueError where `value`, decoded from `source`, holds half a character."""
    if "\\u" in source or not source.isascii():
        json.dumps(value, ensure_ascii=False).encode()


def _named(tools: Mapping[str, Tool], name: object) -> Tool:
    if not isinstance(name, str) or name not in tools:
        raise ToolError(f"there is no tool {_short(repr(name))}; there are: {', '.join(tools)}.")
    return tools[name]


def _short(text: str) -> str:
    """Words about what a model wrote: their head, and their end, which says what is wrong."""
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number is out of range")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands there twice")
    return value
