"""Tools that run in the server, as services of their environment.

The server checks the arguments itself: a worker may send anything.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import structlog
from envserver_records.errors import ConfigError, InputError, ServiceError

from ..environment import Caller, Environment, Service, Services, tools_of, typed_methods
from .calling import ToolError, blaming, is_bug, place_of
from .mcp_client import McpConnection, McpServer, connect
from .typed import CALLER, TypedTool, result_text

T = TypeVar("T")
_MOST_UNANSWERED = 3
_log = structlog.get_logger("envserver.services")


@asynccontextmanager
async def services_of(environment: Environment) -> AsyncIterator[Mapping[str, Service]]:
    """Enters the environment's services, with its tools on the server among them."""
    tools: dict[str, Service] = {
        tool.name: partial(_serve, tool) for tool in server_tools(environment)
    }
    async with AsyncExitStack() as stack:
        for server in shared_servers(environment):
            shared = await stack.enter_async_context(SharedServer(server))
            tools |= {
                f"{server.service}/tools": shared.tools,
                f"{server.service}/call": shared.call,
            }
        services = await stack.enter_async_context(_own_services(environment))
        if twice := tools.keys() & services.keys():
            raise ConfigError(f"{', '.join(sorted(twice))}: a service and a tool have one name.")
        if isinstance(services, Services):
            services.update(tools)  # with their state and counters
            yield services
        else:
            yield {**services, **tools}


@asynccontextmanager
async def _own_services(environment: Environment) -> AsyncIterator[Mapping[str, Service]]:
    async with AsyncExitStack() as stack:
        starting = f"Environment {environment.name!r} cannot start its services"
        hint = "Return nullcontext({...}), or put @contextlib.asynccontextmanager above `services`."
        with blaming(starting, environment.services):
            services: Any = environment.services()
            is_context = isinstance(services, AbstractAsyncContextManager)
            if is_context:
                leave = services.__aexit__
                services = await services.__aenter__()

                async def end(*reason: Any) -> None:
                    with blaming(f"Environment {environment.name!r} cannot end its services"):
                        await leave(*reason)

                stack.push_async_exit(end)
        with blaming(starting, environment.services, hint):
            if not (is_context and isinstance(services, Mapping)):
                raise TypeError(f"it must open a dict of services, not give {services!r:.50}")
        yield services


def server_tools(environment: Environment) -> list[TypedTool]:
    given = [*typed_methods(environment).values(), *tools_of(environment)]
    marked = [tool for tool in given if isinstance(tool, TypedTool) and tool.on_server]
    return list({tool.name: tool for tool in marked}.values())


def shared_servers(environment: Environment) -> list[McpServer]:
    listed = [
        tool for tool in environment.tools or () if isinstance(tool, McpServer) and tool.shared
    ]
    names = [tool.name for tool in listed]
    if len(set(names)) < len(names):
        raise ConfigError(f"Shared MCP servers need different names, not {', '.join(names)}.")
    return listed


class SharedServer:
    """One connection to an MCP server for all rollouts, opened at the first call.

    It is opened again after it broke, or after several calls in a row got no answer (one slow call
    must not end those of others).
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._connection: McpConnection | None = None
        self._stack = AsyncExitStack()
        self._unanswered = 0

    async def __aenter__(self) -> SharedServer:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def tools(self, arguments: dict[str, Any], caller: Caller) -> list[dict[str, Any]]:
        return await self._used(lambda connection: connection.describe())

    async def call(self, arguments: dict[str, Any], caller: Caller) -> str:
        """The service `mcp/NAME/call`: `{"name", "arguments"}`, see `McpConnection.call`."""
        name, given = arguments.get("name"), arguments.get("arguments")
        if not isinstance(name, str) or not isinstance(given, dict):
            raise InputError("A call needs a name and arguments.")
        if self._server.only and name not in self._server.only:
            raise InputError(f"{name[:80]!r} is not offered.")
        try:
            return await self._used(lambda connection: connection.call(name, given))
        except ToolError as error:
            raise InputError(str(error)) from error

    async def _used(self, request: Callable[[McpConnection], Awaitable[T]]) -> T:
        async with self._lock:
            if self._connection is None:
                self._connection = await self._stack.enter_async_context(connect(self._server))
            connection = self._connection
        try:
            answer = await request(connection)
        except ServiceError as error:
            self._unanswered += 1
            if self._unanswered >= _MOST_UNANSWERED or not error.detail.get("timeout"):
                await self._drop(connection)
            raise
        self._unanswered = 0
        return answer

    async def _drop(self, connection: McpConnection) -> None:
        async with self._lock:
            if self._connection is connection:
                self._connection, self._unanswered = None, 0
                await self._stack.aclose()


async def _serve(tool: TypedTool, arguments: dict[str, Any], caller: Caller) -> str:
    """Runs a tool for a rollout; a plain function runs in a thread."""
    try:
        values = tool.checked(arguments)
        if CALLER in inspect.signature(tool.original).parameters:
            values[CALLER] = caller
        called = tool.original if tool.is_async else partial(asyncio.to_thread, tool.original)
        return result_text(await called(**values))
    except ToolError as error:
        raise InputError(str(error)) from error
    except Exception as error:
        if not is_bug(error):
            raise
        _log.exception("service_failed", rollout_id=caller.rollout_id, service=tool.name)
        what = f"The tool {tool.name!r} raised {type(error).__name__} in the server"
        bug = f"A bug in the environment: {what} {place_of(error)} Its log has the traceback."
        raise ServiceError(f"{what}.", bug=bug) from error
