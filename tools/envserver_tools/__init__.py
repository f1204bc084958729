"""Tools for agents: a function and its description for the model, and loops that run them.

Names are imported when they are first used; `documents`, `retrieval` and `web` have names of their
own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calculator import CALCULATE, calculate
    from .calling import (
        Tool,
        ToolError,
        ToolResult,
        call_tool,
        descriptions,
        function_tool,
        run_tool_call,
        toolbox,
        use_tool,
        visible_text,
    )
    from .loop import LoopEnd, chat_with_tools
    from .protocol import ProtocolRun, describe_tools, parse_message, run_protocol
    from .sandboxed import PRELOAD, read_patch, sandbox_tools
    from .smolagents_adapter import as_smolagents

# The programs in a sandbox import this package too, so it must not import the tools itself.
_MODULES = {
    name: module
    for module, names in {
        "calculator": "CALCULATE calculate",
        "calling": "Tool ToolError ToolResult call_tool descriptions function_tool run_tool_call"
        " toolbox use_tool visible_text",
        "loop": "LoopEnd chat_with_tools",
        "protocol": "ProtocolRun describe_tools parse_message run_protocol",
        "sandboxed": "PRELOAD read_patch sandbox_tools",
        "smolagents_adapter": "as_smolagents",
    }.items()
    for name in names.split()
}

__all__ = [
    "CALCULATE", "LoopEnd", "PRELOAD", "ProtocolRun", "Tool", "ToolError", "ToolResult",
    "as_smolagents", "calculate", "call_tool", "chat_with_tools", "describe_tools", "descriptions",
    "function_tool", "parse_message", "read_patch", "run_protocol", "run_tool_call",
    "sandbox_tools", "toolbox", "use_tool", "visible_text",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
