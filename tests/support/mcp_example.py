"""An MCP server of the official package: `python mcp_example.py [PORT]`, on stdio or over HTTP."""

import os
import sys
import time

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("example")
noted: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool(name="notes.add")
def note(text: str) -> str:
    """Note a text; returns all notes and the process."""
    noted.append(text)
    return f"{','.join(noted)} {os.getpid()} {os.getppid()}"


@server.tool()
def key(context: Context) -> str:
    """Return the key that this server was given."""
    return (context.headers or {}).get("x-key") or os.environ.get("EXAMPLE_KEY", "none")


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide."""
    if b == 0:
        raise ToolError("division by zero")
    return a / b


@server.tool()
def crash() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def sleep() -> str:
    """Never answer."""
    time.sleep(600)
    return ""


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
