"""Opens tools for a rollout: what runs here, what the server runs, what an MCP server runs.

In: tools as an environment lists them. Out: tools by name, each of which this process can call
until the end of the block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from envserver_records.errors import ConfigError, InputError, NotFoundError

from ..rollout_interface import Rollout
from .calling import Tool, ToolError, toolbox
from .mcp_client import McpServer, connect
from .sources import Tools
from .typed import as_tool


@asynccontextmanager
async def open_tools(tools: Tools, run: Rollout) -> AsyncIterator[Mapping[str, Tool]]:
    """Yields tools by name; MCP servers that are not shared run within the block.

    Raises:
        TypeError: two have the same name, or a function cannot be a tool (see `typed.tool`).
        ConfigError, ServiceError: an MCP server is not set up well, or failed.
    """
    async with AsyncExitStack() as stack:
        opened: list[Tool] = []
        for one in tools.values() if isinstance(tools, Mapping) else tools:
            if isinstance(one, McpServer):
                opened += await _tools_of(one, run, stack)
            else:
                opened.append(_here(as_tool(one), run))
        yield _by_name(opened)


def _by_name(tools: list[Tool]) -> dict[str, Tool]:
    names = [one.name for one in tools]
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
    """Returns the tools of an MCP server, started here unless it is shared."""
    if not server.shared:
        own = await stack.enter_async_context(connect(server, run))
        return [
            _of_mcp(server, one, partial(own.call, one["name"])) for one in await own.describe()
        ]
    try:
        listed = await run.call_tool(f"{server.service}/tools", {})
    except (InputError, NotFoundError) as error:
        raise ConfigError(
            f"The server does not know the shared MCP server {server.name!r}: {error.message}",
            hint="List it in `Environment.tools`.",
        ) from error
    return [_of_mcp(server, one, partial(_through, run, server, one["name"])) for one in listed]


async def _through(run: Rollout, server: McpServer, name: str, arguments: dict[str, Any]) -> str:
    return await _asked(run, f"{server.service}/call", name=name, arguments=arguments)


def _of_mcp(
    server: McpServer, listed: dict[str, Any], call: Callable[[dict[str, Any]], Awaitable[str]]
) -> Tool:
    async def function(**arguments: Any) -> str:
        return await call(arguments)

    return Tool(listed["tool"], function, server.max_characters)
