"""Imports the official package `mcp` (extra `mcp`), which takes about a second, in a thread."""

from __future__ import annotations

import asyncio

from envserver_records.errors import ConfigError
from envserver_records.extras import missing_module_hint


async def import_mcp(purpose: str) -> None:
    """Imports what `mcp_client` and `mcp_server` use; the event loop goes on.

    Args:
        purpose: what needs it, for the error.

    Raises:
        ConfigError: it is not installed.
    """
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
