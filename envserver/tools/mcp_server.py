"""Offers tools as an MCP server, to agents that speak only MCP (extra `mcp`).

It is in this process, behind a secret path. What the model did wrong is a result with `isError`.
Any other failure (a limit, the sandbox, a bug) is reported to the agent, which may hide it: so it
is raised again at the end of the block.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ..version import __version__
from .calling import Tool, ToolResult, use_tool
from .mcp_client import import_mcp

if TYPE_CHECKING:
    from mcp.server import Server

_STOP_SECONDS = 5


@asynccontextmanager
async def serve_tools(
    tools: Mapping[str, Tool], on_result: Callable[[ToolResult], None] = lambda result: None
) -> AsyncIterator[str]:
    """Yields the address of an MCP server with these tools; calls run at the same time."""
    import uvicorn

    await import_mcp("An agent that speaks MCP")
    failures: list[Exception] = []
    secret = secrets.token_hex(24)
    app = _server(tools, on_result, failures).streamable_http_app(
        streamable_http_path=f"/{secret}/mcp"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=_STOP_SECONDS
        )
        http = uvicorn.Server(config)
        # Signals are the worker's.
        http.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
        serving = asyncio.create_task(http.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/{secret}/mcp"
        except Exception:
            if failures:  # it is why the agent failed
                raise failures[0] from None
            raise
        finally:
            http.should_exit = True
            await asyncio.wait({serving})
    if failures:
        raise failures[0]


def _server(
    tools: Mapping[str, Tool], on_result: Callable[[ToolResult], None], failures: list[Exception]
) -> Server[Any]:
    from mcp import types
    from mcp.server import Server

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        described = [tool.description["function"] for tool in tools.values()]
        listed = [
            types.Tool(
                name=tool["name"], description=tool["description"], input_schema=tool["parameters"]
            )
            for tool in described
        ]
        return types.ListToolsResult(tools=listed)

    async def call_tool(context: Any, params: Any) -> types.CallToolResult:
        try:
            result = await use_tool(tools, params.name, params.arguments or {})
        except Exception as error:
            failures.append(error)
            raise
        on_result(result)
        text = types.TextContent(text=result.text)
        return types.CallToolResult(content=[text], is_error=not result.ok)

    async def list_resources(context: Any, params: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[])

    async def list_templates(context: Any, params: Any) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[])

    async def list_prompts(context: Any, params: Any) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[])

    return Server(
        "envserver",
        version=__version__,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        # Some agents ask for these whatever the server says it has, and stop at an error.
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_list_prompts=list_prompts,
    )
