"""Sandboxes with their tools, behind any backend, for tests of the tools."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
from envserver_tools.calling import ToolResult, use_tool
from envserver_tools.sandboxed import sandbox_tools

from envserver import ConfigError, Sandbox, Sandboxes
from support.sandboxes import sandboxes


class Bench:
    """A sandbox and its tools, called as a model calls them."""

    def __init__(self, sandbox: Sandbox, **options: Any) -> None:
        self.sandbox = sandbox
        self.tools = sandbox_tools(sandbox, **options)

    async def __call__(self, name: str, **arguments: Any) -> str:
        """The text of a call that must be in order."""
        result = await self.result(name, **arguments)
        assert result.ok, result.text
        return result.text

    async def refused(self, name: str, **arguments: Any) -> str:
        """The text of a call that must not be."""
        result = await self.result(name, **arguments)
        assert not result.ok, result.text
        assert result.text.startswith("Error: ")
        return result.text

    async def result(self, name: str, **arguments: Any) -> ToolResult:
        return await use_tool(self.tools, name, arguments)

    async def sh(self, script: str) -> str:
        """What a script says that must end well."""
        done = await self.sandbox.exec(["bash", "-euc", script])
        assert done.ok, done.stderr + done.stdout
        return done.stdout.decode(errors="replace")


class Houses:
    """A service of sandboxes for each backend, made when a test asks for it first."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._made: dict[str, Sandboxes | str] = {}

    async def at(self, backend: str) -> Sandboxes:
        if backend not in self._made:
            try:
                self._made[backend] = await self._stack.enter_async_context(sandboxes(backend))
            except ConfigError as error:
                self._made[backend] = str(error)
        house = self._made[backend]
        if isinstance(house, str):
            pytest.skip(house)
        return house
