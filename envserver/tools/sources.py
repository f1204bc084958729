"""What an environment may list as its tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .calling import Tool
from .mcp_client import McpServer

ToolSource = Tool | McpServer | Callable[..., Any]
"""A tool, an MCP server with its tools, or a typed function or method."""
Tools = Mapping[str, Tool] | Iterable[ToolSource]
"""Tools by name, or a list of sources."""
