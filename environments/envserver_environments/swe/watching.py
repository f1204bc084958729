"""Tools that log their calls, and optionally ask the user for confirmation first.

In: tools of a sandbox. Out: the same tools; each call becomes an action of the rollout, and a
command runs only when the service `confirm` of the server allows it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from envserver_tools.calling import Tool, ToolError

from envserver import Rollout

CONFIRM = "confirm"
"""The service that asks."""
COMMANDS = ("bash", "run_cmd")
_STATUS = re.compile(r"\[exit status (\d+)\]\n?")


def watched(tools: Mapping[str, Tool], run: Rollout, confirm: bool) -> dict[str, Tool]:
    """Wraps `tools`: calls are logged to `run`, and commands ask first if `confirm`."""
    return {name: _watched(tool, run, confirm and name in COMMANDS) for name, tool in tools.items()}


def _watched(tool: Tool, run: Rollout, asks: bool) -> Tool:
    async def function(**arguments: Any) -> str:
        try:
            if asks and not await run.call_tool(CONFIRM, {"tool": tool.name, **arguments}):
                raise ToolError("the user refuses this command")
            said = tool.function(**arguments)
            text = said if isinstance(said, str) else await said
        except ToolError as error:
            run.log_action(tool.name, arguments, error=str(error))
            raise
        run.log_action(tool.name, arguments, _output(tool.name, text))
        return text

    return dataclasses.replace(tool, function=function)


def _output(name: str, text: str) -> Any:
    """Returns a command's status and its output (both streams, in order)."""
    ended = _STATUS.match(text) if name in COMMANDS else None
    if ended is None:
        return text
    return {"returncode": int(ended[1]), "stdout": text[ended.end() :], "stderr": ""}
