"""Tools as agents call them from a thread: natively, or as functions of the model's code."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

from envserver_tools.calling import Tool, ToolError, ToolResult, call_tool, run_tool_call, toolbox

from ..interpreter.inside import ANSWER, answer_text
from ..interpreter.process import Interpreter, Outcome, observation, shortened
from .prompts import TOOL_FAILED

PYTHON = "python"
_ERROR_CHARACTERS = 3500

_FINAL_ANSWER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": ANSWER,
        "description": "Gives the final answer and ends the task. Call it alone.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": ["string", "number", "array"]}},
            "required": ["answer"],
            "additionalProperties": False,
        },
    },
}
_PYTHON: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PYTHON,
        "description": (
            "Executes Python code and gives what it printed, the value of its last expression, or "
            "its error. Variables and files stay for the next call."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}

final_answer = Tool(_FINAL_ANSWER, lambda answer: answer_text(answer))


class Tools:
    """The tools that an agent calls natively: the given ones, python and final_answer.

    Args:
        loop: the event loop in which asynchronous tools run while the agent's thread waits.
    """

    def __init__(
        self,
        given: Iterable[Tool],
        interpreter: Interpreter,
        characters: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._interpreter = interpreter
        self._characters = characters
        self._loop = loop
        python = Tool(_PYTHON, self._python, max_characters=2 * characters)
        self.tools = toolbox(*given, python, final_answer)
        self.outcome: Outcome | None = None
        """Outcome of the last call of python."""

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """Returns the tools' schemas for a chat completion."""
        return [tool.description for tool in self.tools.values()]

    def run(self, call: dict[str, Any]) -> ToolResult:
        """The result of one call in OpenAI's shape; not from the loop's own thread."""
        return run_from_thread(self.tools, call, self._loop)

    def _python(self, code: str) -> str:
        outcome = self.outcome = self._interpreter.run(code)
        if outcome.answer is not None:
            raise ToolError("final_answer is a tool of its own: call it, not in code.")
        text = observation(outcome, self._characters)
        if outcome.trouble is not None:
            raise ToolError(shortened(text, _ERROR_CHARACTERS))
        return f"It printed:\n{text}" if text.startswith(TOOL_FAILED) else text


def as_function(tool: Tool, loop: asyncio.AbstractEventLoop) -> Callable[..., str]:
    """`tool` for the model's code; it raises ToolError where the call is not in order."""
    names = list(tool.description["function"]["parameters"]["properties"])

    def function(*values: Any, **named: Any) -> str:
        arguments = {**dict(zip(names, values, strict=False)), **named}
        given = {name: value for name, value in arguments.items() if value is not None}
        call = {"function": {"name": tool.name, "arguments": json.dumps(given)}}
        result = run_from_thread(toolbox(tool), call, loop)
        if not result.ok:
            raise ToolError(result.text.removeprefix("Error: "))
        return result.text

    return function


def run_from_thread(
    tools: dict[str, Tool], call: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> ToolResult:
    """Runs `call` from a thread: a plain tool here, an asynchronous one on the event loop."""
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    tool = tools.get(name) if isinstance(name, str) else None
    if tool is not None and inspect.iscoroutinefunction(tool.function):
        return asyncio.run_coroutine_threadsafe(call_tool(tools, call), loop).result()
    return run_tool_call(tools, call)
