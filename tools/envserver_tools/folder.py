"""File tools of an agent whose own process is in a sandbox already: read, write and append.

They work in the process's current directory, by the same code that works in a sandbox's workspace
(`inside`): paths that lead out of it, also by links, are refused, as are writes to links, devices
and git's files, and contents over a megabyte. The sandbox limits the rest: a program of the model
beside them can do no less.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from . import inside
from .calling import Tool, ToolError, toolbox
from .sandboxed import description

_NAMES = {
    "read_file": "read_file",
    "write_file": "write_file",
    "append_to_file": "append_file",
}
"""A tool's name, and what carries it out."""


def folder_tools() -> dict[str, Tool]:
    """Returns `read_file`, `write_file` and `append_to_file` for the current directory."""
    return toolbox(*(_tool(name, implementation) for name, implementation in _NAMES.items()))


def _tool(name: str, implementation: str) -> Tool:
    described = description(implementation, command_seconds=0)
    function = {**described["function"], "name": name}
    run = partial(_run, implementation)
    return Tool({**described, "function": function}, run, inside.MAX_CHARACTERS + 100)


def _run(implementation: str, **arguments: Any) -> str:
    answer = inside.answer_to(implementation, arguments)
    if "error" in answer:
        raise ToolError(str(answer["error"]))
    return str(answer["text"])
