"""Runs a model's tool calls: the names of `envserver.tools.calling`, where tools import them; how
the tools here are described; the visible part of a model's text."""

from __future__ import annotations

from collections.abc import Iterable

from envserver_records.tasks import Json

from envserver.tools.calling import (
    CUT_MARKER,
    MAX_RESULT_CHARACTERS,
    StrictDecoder,
    Tool,
    ToolError,
    ToolResult,
    call_tool,
    check_characters,
    checked_arguments,
    checked_call,
    cut,
    descriptions,
    function_tool,
    refused,
    run_tool_call,
    toolbox,
    use_tool,
)

__all__ = [
    "CUT_MARKER", "MAX_RESULT_CHARACTERS", "StrictDecoder", "Tool", "ToolError", "ToolResult",
    "call_tool", "check_characters", "checked_arguments", "checked_call", "cut", "descriptions",
    "function_tool", "refused", "run_tool_call", "toolbox", "described", "integer", "use_tool",
    "visible_text",
]  # fmt: skip


def visible_text(text: str) -> str | None:
    """Returns the visible text, or None if the model never stopped thinking.

    It is the text after the last `</think>`; a text with an unclosed `<think>` has none.
    """
    _, closed, after = text.rpartition("</think>")
    if "<think>" in after:
        return None
    return after if closed else text


def described(name: str, text: str, properties: Json, required: Iterable[str] = ()) -> Json:
    """A tool in OpenAI's shape; arguments without a name in `properties` are refused."""
    parameters: Json = {
        "type": "object",
        "properties": properties,
        "required": list(required),
    }
    parameters["additionalProperties"] = False
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


def integer(description: str, minimum: int = 1, maximum: int | None = None) -> Json:
    """The JSON schema of an argument."""
    most = {} if maximum is None else {"maximum": maximum}
    return {"type": "integer", "minimum": minimum, **most, "description": description}
