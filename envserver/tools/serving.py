"""Tools that run in the server, as services of their environment.

In: an environment with `@tool(on_server=True)` methods. Out: its services with those tools among
them. The server checks the arguments itself: a worker may send anything.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
from envserver_records.errors import ConfigError, InputError, ServiceError

from ..environment import Caller, Environment, Service, Services, typed_methods
from .bugs import is_bug, place_of
from .calling import ToolError
from .typed import CALLER, TypedTool, result_text

_log = structlog.get_logger("envserver.services")


@asynccontextmanager
async def services_of(environment: Environment) -> AsyncIterator[Mapping[str, Service]]:
    """Enters the environment's services, with its tools on the server among them.

    Raises:
        ConfigError: a tool has the name of a service.
    """
    tools = {one.name: partial(_serve, one) for one in server_tools(environment)}
    async with environment.services() as services:
        if twice := tools.keys() & services.keys():
            raise ConfigError(f"{', '.join(sorted(twice))}: a service and a tool have one name.")
        if isinstance(services, Services):
            services.update(tools)  # with their state and counters
            yield services
        else:
            yield {**services, **tools}


def server_tools(environment: Environment) -> list[TypedTool]:
    """Returns the methods and listed tools that are marked `on_server`."""
    given = [*typed_methods(environment).values(), *(environment.tools or ())]
    marked = [one for one in given if isinstance(one, TypedTool) and one.on_server]
    return list({one.name: one for one in marked}.values())


async def _serve(tool: TypedTool, arguments: dict[str, Any], caller: Caller) -> str:
    """Runs a tool for a rollout; a plain function runs in a thread.

    Raises:
        InputError: the arguments are wrong, or the tool raised ToolError; the model reads it.
        ServiceError: a bug of the tool, told without the exception's message: it may hold keys.
    """
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
