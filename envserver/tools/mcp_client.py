"""Tools of an MCP server, for environments (extra `mcp`).

What a tool of it reports as an error is shown to the model; a server that cannot be reached, breaks
off or takes too long is a `ServiceError`: the rollout is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import string
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from envserver_records.errors import ConfigError, LimitReached, SandboxError, ServiceError
from envserver_records.extras import missing_module_hint

from ..sandbox_interface import Programs, RunningProgram
from .calling import MAX_RESULT_CHARACTERS, ToolError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.shared.message import SessionMessage


_MOST_LINE_BYTES = 16 << 20


@asynccontextmanager
async def over_program(program: RunningProgram) -> AsyncIterator[Any]:
    """Yields the streams of messages from and to the program, as `mcp.Client` takes them."""
    import anyio

    received_writer, received = anyio.create_memory_object_stream[Any](0)
    sent, sent_reader = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        async with received_writer:
            begun = b""
            while (data := await program.receive()) and len(begun) <= _MOST_LINE_BYTES:
                *lines, begun = (begun + data).split(b"\n")
                for line in filter(bytes.strip, lines):
                    with contextlib.suppress(anyio.BrokenResourceError):  # the reader has gone
                        await received_writer.send(_message(line))

    async def write() -> None:
        async for message in sent_reader:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await program.send(f"{text}\n".encode())

    async with anyio.create_task_group() as tasks, received, sent, sent_reader:
        tasks.start_soon(read)
        tasks.start_soon(write)
        yield received, sent
        tasks.cancel_scope.cancel()


def _message(line: bytes) -> SessionMessage | Exception:
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def import_mcp(purpose: str) -> None:
    """Imports what `mcp_client` and `mcp_server` use; the event loop goes on."""
    try:
        await asyncio.to_thread(_import)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{purpose} needs the package mcp, version 2: {error}.", hint=missing_module_hint("mcp")
        ) from error


def _import() -> None:
    import httpx2
    import mcp.client.streamable_http
    import mcp.server

    assert httpx2 and mcp


# What holds a task group (an MCP client does) must be left by the task that entered it, and wraps
# exceptions that cross it. Here they do not cross it, and any task may leave the block.

T = TypeVar("T")
LEAVE_SECONDS = 10.0
"""Seconds to leave the context; then it is cancelled."""


@asynccontextmanager
async def in_own_task(make: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """Enters what `make` returns and leaves it at the end of the block.

    Raises what entering it raised, without a group around a single exception.
    """
    opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def hold() -> None:
        try:
            async with make() as value:
                opened.set_result(value)
                await leave.wait()
        except Exception as error:  # noqa: BLE001 - the task that waits for it gets it
            if not opened.done():
                opened.set_exception(_single(error))
                return
            import structlog  # what only imports an environment does without it

            log = structlog.get_logger("envserver.tools")
            log.warning("context_left_badly", error=str(_single(error)))

    task = asyncio.create_task(hold())
    try:
        yield await opened
    finally:
        leave.set()
        if opened.cancelled() or not opened.done():
            task.cancel()
        _, late = await asyncio.wait({task}, timeout=LEAVE_SECONDS)
        for call in late:
            call.cancel()


def _single(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
CONNECT_SECONDS = 60.0
"""Seconds to start or reach a server; overloaded machines are slow."""
SHARED_PREFIX = "mcp/"
"""Services with such names are tools of shared servers."""
_MODELS_FAULT = (-32602,)  # JSON-RPC's "invalid params"


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """An MCP server whose tools an environment offers: list it in `tools`.

    Args:
        command: program and arguments of a server on stdio; "python" is the worker's own, with
            its packages. It sees the variables HOME, PATH and the like, and `env`.
        url: address of a server over streamable HTTP, instead of a command.
        name: names it in errors; unique among shared servers.
        env, headers: variables of a command, HTTP headers for an address. `${NAME}` is replaced
            by a variable of the process that connects: the server, if it is shared.
        shared: one connection in the server, for all rollouts. Else each rollout has its own, in
            its worker: in the sandbox if the environment's isolation is "sandboxed".
        in_sandbox: the command runs in a sandbox of its own (`Rollout.open_program`), with the
            files and limits of `Environment.sandbox`; its variables are the sandbox's, and `env`.
            "python" is found by the sandbox's PATH.
        only: the tools to offer; empty: all.
        prefix: put before the names of its tools.
        timeout_seconds: for one call.
        max_characters: longer results are cut.
    """

    command: Sequence[str] = ()
    url: str = ""
    name: str = "mcp"
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False
    in_sandbox: bool = False
    only: Sequence[str] = ()
    prefix: str = ""
    timeout_seconds: float = 60.0
    max_characters: int = MAX_RESULT_CHARACTERS

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"The MCP server {self.name!r} needs a command or a url, not both.")
        if self.in_sandbox and (self.shared or not self.command):
            raise ConfigError(
                f"The MCP server {self.name!r} cannot run in a sandbox: only a command that each "
                "rollout starts can."
            )

    @property
    def service(self) -> str:
        return f"{SHARED_PREFIX}{self.name}"


class McpConnection:
    def __init__(self, server: McpServer, client: Client, program: RunningProgram | None) -> None:
        self._server = server
        self._client = client
        self._program = program

    async def describe(self) -> list[dict[str, Any]]:
        """Returns its tools: `{"name", "tool"}`, its own name and an OpenAI function tool."""
        listed: list[Any] = []
        cursor: str | None = None
        while cursor or not listed:
            page = await self._within(self._client.list_tools(cursor=cursor))
            listed += page.tools
            cursor = page.next_cursor
            if not page.tools:
                break
        only = set(self._server.only) or {tool.name for tool in listed}
        if missing := only - {tool.name for tool in listed}:
            lacks = f"The MCP server {self._server.name!r} has no tool {', '.join(sorted(missing))}"
            raise ConfigError(f"{lacks}; it has: {', '.join(tool.name for tool in listed)}.")
        return [self._described(tool) for tool in listed if tool.name in only]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool by its own name; returns the result as text."""
        result = await self._within(self._client.call_tool(name, arguments))
        text = "\n".join(map(_text_of, result.content))
        if not result.content and result.structured_content is not None:
            text = msgspec.json.encode(result.structured_content).decode()
        if result.is_error:
            raise ToolError(text or "the tool failed.")
        return text

    async def _within(self, request: Any) -> Any:
        from mcp import MCPError

        try:
            async with asyncio.timeout(self._server.timeout_seconds):
                return await request
        except MCPError as error:
            if error.code in _MODELS_FAULT:
                raise ToolError(error.message) from error
            raise self._failed(error.message) from error
        except TimeoutError:
            seconds = self._server.timeout_seconds
            raise self._failed(f"no answer within {seconds:g} seconds", timeout=True) from None
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error

    def _failed(self, why: str, *, timeout: bool = False) -> ServiceError:
        what = f"The MCP server {self._server.name!r} failed: {why}.{_end_of(self._program)}"
        return ServiceError(what, timeout=timeout)

    def _described(self, listed: Any) -> dict[str, Any]:
        name = _NOT_IN_NAMES.sub("_", self._server.prefix + listed.name)[:64]
        function = {
            "name": name,
            "description": listed.description or listed.title or name,
            "parameters": listed.input_schema,
        }
        return {"name": listed.name, "tool": {"type": "function", "function": function}}


@asynccontextmanager
async def connect(server: McpServer, run: Programs | None = None) -> AsyncIterator[McpConnection]:
    """Starts or reaches the server; ends it with its processes at the end of the block."""
    await import_mcp(f"The MCP server {server.name!r}")
    program: RunningProgram | None = None
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if server.in_sandbox:
                    assert run is not None
                    opened = run.open_program(server.command, env=_filled(server, server.env))
                    program = await stack.enter_async_context(opened)
                made = in_own_task(partial(_client, server, program))
                client = await stack.enter_async_context(made)
        except (ConfigError, SandboxError, LimitReached):
            raise
        except FileNotFoundError as error:
            raise ConfigError(
                f"The MCP server {server.name!r} cannot be started: {error}."
            ) from error
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ServiceError(
                f"The MCP server {server.name!r} cannot be reached: {what}.{_end_of(program)}"
            ) from error
        yield McpConnection(server, client, program)


def _end_of(program: RunningProgram | None) -> str:
    """Returns how a program in a sandbox ended, as a further sentence; "" if it did not."""
    result = program.result if program is not None else None
    if result is None:
        return ""
    how = f"killed by {result.killed_by}" if result.killed_by else f"exit {result.exit}"
    return f" Its program ended ({how}): {result.stderr.decode(errors='replace')[-1000:]}"


@asynccontextmanager
async def _client(server: McpServer, running: RunningProgram | None) -> AsyncIterator[Client]:
    import httpx2
    from mcp import Client, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client

    if running is not None:
        async with Client(over_program(running)) as client:
            yield client
        return
    if server.command:
        program, *args = server.command
        program = sys.executable if program in ("python", "python3") else program
        env = _filled(server, server.env)
        async with Client(StdioServerParameters(command=program, args=args, env=env)) as client:
            yield client
        return
    from envserver_records.servers import proxy_of

    async with (
        httpx2.AsyncClient(
            headers=_filled(server, server.headers),
            timeout=server.timeout_seconds,
            transport=httpx2.AsyncHTTPTransport(proxy=proxy_of(server.url)),
        ) as http,
        Client(streamable_http_client(server.url, http_client=http)) as client,
    ):
        yield client


def _filled(server: McpServer, values: Mapping[str, str]) -> dict[str, str]:
    try:
        return {key: string.Template(text).substitute(os.environ) for key, text in values.items()}
    except KeyError as error:
        raise ConfigError(f"The MCP server {server.name!r} needs the variable {error}.") from None


def _text_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    resource = getattr(block, "resource", None)
    if getattr(resource, "text", None) is not None:
        return str(resource.text)  # type: ignore[union-attr]
    return f"[{block.type}: {getattr(block, 'mime_type', None) or 'not shown'}]"
