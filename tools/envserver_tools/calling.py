"""Runs a model's tool calls: the names of `envserver.tools.calling`, where tools import them."""

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
]
