"""Runs a model's tool calls: the names of `envserver.tools.calling`, where tools import them; and
the visible part of a model's text."""

from __future__ import annotations

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
    "CUT_MARKER",
    "MAX_RESULT_CHARACTERS",
    "StrictDecoder",
    "Tool",
    "ToolError",
    "ToolResult",
    "call_tool",
    "check_characters",
    "checked_arguments",
    "checked_call",
    "cut",
    "descriptions",
    "function_tool",
    "refused",
    "run_tool_call",
    "toolbox",
    "use_tool",
    "visible_text",
]


def visible_text(text: str) -> str | None:
    """Returns the visible text, or None if the model never stopped thinking.

    It is the text after the last `</think>`; a text with an unclosed `<think>` has none.
    """
    _, closed, after = text.rpartition("</think>")
    if "<think>" in after:
        return None
    return after if closed else text
