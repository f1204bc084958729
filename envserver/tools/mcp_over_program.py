"""MCP's stdio transport, over a program in a sandbox: one JSON message a line, both ways."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..sandbox_interface import RunningProgram

if TYPE_CHECKING:
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
                    with contextlib.suppress(anyio.BrokenResourceError):  # nobody listens any more
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
    """Returns a message; what is not one as the error that says so."""
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error
