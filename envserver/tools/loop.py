"""The agent loop, `run.loop`: chat with tools until the model is done.

The conversation grows in place, and the metric `tool_errors` counts the calls that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from envserver_records.errors import ConfigError, InputError, NotFoundError
from envserver_records.tasks import Message

from ..rollout_interface import Reply, Rollout
from .calling import LoopEnd, Tool, ToolError, ToolResult, call_tool, descriptions, toolbox
from .mcp_client import McpServer, connect
from .sources import Tools
from .typed import as_tool


@asynccontextmanager
async def open_tools(tools: Tools, run: Rollout) -> AsyncIterator[Mapping[str, Tool]]:
    """Yields tools by name; MCP servers that are not shared run within the block."""
    async with AsyncExitStack() as stack:
        opened: list[Tool] = []
        for tool in tools.values() if isinstance(tools, Mapping) else tools:
            if isinstance(tool, McpServer):
                opened += await _tools_of(tool, run, stack)
            else:
                opened.append(_here(as_tool(tool), run))
        yield _by_name(opened)


def _by_name(tools: list[Tool]) -> dict[str, Tool]:
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TypeError(f"Two tools have the name {', '.join(twice)}.")
    return toolbox(*tools)


def _here(tool: Tool, run: Rollout) -> Tool:
    """Returns a tool that this process can call: one on the server is asked by name."""
    if not tool.on_server:
        return tool
    return replace(tool, function=partial(_asked, run, tool.name))


async def _asked(run: Rollout, service: str, /, **arguments: Any) -> str:
    try:
        return str(await run.call_tool(service, msgspec.to_builtins(arguments)))
    except InputError as error:
        raise ToolError(error.message) from error


async def _tools_of(server: McpServer, run: Rollout, stack: AsyncExitStack) -> list[Tool]:
    if not server.shared:
        own = await stack.enter_async_context(connect(server, run))
        return [
            _of_mcp(server, described, partial(own.call, described["name"]))
            for described in await own.describe()
        ]
    try:
        listed = await run.call_tool(f"{server.service}/tools", {})
    except (InputError, NotFoundError) as error:
        raise ConfigError(
            f"The server does not know the shared MCP server {server.name!r}: {error.message}",
            hint="List it in `Environment.tools`.",
        ) from error
    return [
        _of_mcp(server, described, partial(_through, run, server, described["name"]))
        for described in listed
    ]


async def _through(run: Rollout, server: McpServer, name: str, arguments: dict[str, Any]) -> str:
    return await _asked(run, f"{server.service}/call", name=name, arguments=arguments)


def _of_mcp(
    server: McpServer, listed: dict[str, Any], call: Callable[[dict[str, Any]], Awaitable[str]]
) -> Tool:
    async def function(**arguments: Any) -> str:
        return await call(arguments)

    return Tool(listed["tool"], function, server.max_characters)


async def chat_with_tools(
    run: Rollout,
    messages: list[Message],
    tools: Tools,
    *,
    final: str | None = None,
    max_turns: int | None = None,
    max_tool_errors: int = 10,
    errors_in_a_row: bool = False,
    on_reply: Callable[[Reply], None] = lambda reply: None,
    reminder: Callable[[str], str | None] = lambda text: None,
    is_answer: Callable[[str], bool] = lambda text: False,
    **request: Any,
) -> LoopEnd:
    """Chats and runs tool calls until the model is done.

    Args:
        messages: the conversation; replies and tool results are appended to it.
        tools: opened for the time of the loop (see `open_tools`). The calls of a message
            run in order; adjacent calls of `parallel` tools run at the same time. Results are
            always in order.
        final: name of the tool whose valid call ends the loop; later calls are not run.
        max_turns: maximum number of the model's messages; `run.max_turns` applies, too.
        errors_in_a_row: a call that succeeds resets the errors counted for `max_tool_errors`.
        on_reply: called with each reply before its tool calls run.
        reminder: gets a text without tool calls; returns a user message to continue with, or None
        to end the loop.
        is_answer: whether a text beside tool calls answers the task; these calls run first.
        request: passed to `run.chat`: `agent`, `max_tokens`, `tool_choice` ...
    """
    text = last_text = ""
    errors = counted = 0
    async with open_tools(tools, run) as box:
        offered = descriptions(box.values())
        for _ in range(min(run.max_turns, max_turns or run.max_turns)):
            reply = await run.chat(messages, tools=offered, **request)
            text, last_text = reply.content, reply.content or last_text
            messages.append(reply.message)
            on_reply(reply)
            if reply.finish_reason == "length":
                return LoopEnd("cut_off", text, last_text)
            if not reply.tool_calls:
                reminding = reminder(text)
                if reminding is None:
                    return LoopEnd("text", text, last_text)
                messages.append({"role": "user", "content": reminding})
            for together in _side_by_side(box, reply.tool_calls, final):
                results = await _run_calls(box, together)
                for call, result in zip(together, results, strict=True):
                    if result.ok and call["function"]["name"] == final:
                        return LoopEnd("final_tool", text, last_text, result.text)
                    errors += not result.ok
                    counted = 0 if result.ok and errors_in_a_row else counted + (not result.ok)
                    run.log_metric("tool_errors", errors)
                    messages.append(
                        {"role": "tool", "tool_call_id": call.get("id", ""), "content": result.text}
                    )
            if counted >= max_tool_errors:
                break
            if reply.tool_calls and is_answer(text):
                return LoopEnd("text", text, last_text)
    return LoopEnd("limit", text, last_text)


def _side_by_side(
    tools: Mapping[str, Tool], calls: list[dict[str, Any]], final: str | None
) -> list[list[dict[str, Any]]]:
    parts: list[list[dict[str, Any]]] = []
    was_parallel = False
    for call in calls:
        tool = tools.get(str(call.get("function", {}).get("name")))
        is_parallel = tool is not None and tool.parallel and tool.name != final
        if is_parallel and was_parallel:
            parts[-1].append(call)
        else:
            parts.append([call])
        was_parallel = is_parallel
    return parts


async def _run_calls(tools: Mapping[str, Tool], calls: list[dict[str, Any]]) -> list[ToolResult]:
    """Runs the calls at the same time; the first exception cancels the others."""
    if len(calls) == 1:
        return [await call_tool(tools, calls[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call_tool(tools, call)) for call in calls]
    except* Exception as failed:  # noqa: BLE001 - all of them are raised again
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
