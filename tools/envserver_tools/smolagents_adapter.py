"""The same tools for smolagents. The library is imported when a tool is adapted, not before."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any, ClassVar

from envserver_records.tasks import Json

from .calling import Tool, call_tool, run_tool_call, toolbox


def as_smolagents(tool: Tool, loop: asyncio.AbstractEventLoop | None = None) -> Any:
    """Wraps `tool` as a `smolagents.Tool`. Errors are texts for the model here, too.

    `loop`: for an asynchronous tool; unset: the running loop. The agent itself must run in another
    thread (`await asyncio.to_thread(agent.run, ...)`). Raises ModuleNotFoundError: smolagents is
    not installed. RuntimeError: the tool is asynchronous and there is no loop.
    """
    from smolagents import Tool as SmolTool

    if inspect.iscoroutinefunction(tool.function) and loop is None:
        loop = asyncio.get_running_loop()
    function = tool.description["function"]
    parameters = function["parameters"]

    class Adapted(SmolTool):  # type: ignore[misc]  # a class of a library without types
        name = tool.name
        description = function["description"]
        inputs: ClassVar[Json] = {
            key: _input(schema, key in parameters["required"])
            for key, schema in parameters["properties"].items()
        }
        output_type = "string"
        skip_forward_signature_validation = True

        def forward(self, *values: Any, **named: Any) -> str:
            arguments = {**dict(zip(self.inputs, values, strict=False)), **named}
            given = {key: value for key, value in arguments.items() if value is not None}
            return _run(tool, given, loop)

    return Adapted()


def _input(schema: Json, required: bool) -> Json:
    described = {"description": "", **schema}
    return described if required else {**described, "nullable": True}


def _run(tool: Tool, arguments: Json, loop: asyncio.AbstractEventLoop | None) -> str:
    tools = toolbox(tool)
    source = json.dumps(arguments, default=str)
    call = {"function": {"name": tool.name, "arguments": source}}
    if loop is None:
        return run_tool_call(tools, call).text
    if _running() is loop:
        raise RuntimeError(f"{tool.name} would wait for its own thread: run the agent in another.")
    return asyncio.run_coroutine_threadsafe(call_tool(tools, call), loop).result().text


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
