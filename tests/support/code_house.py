"""The environment `code` with sandboxes of its own, as a scorer has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envserver_environments.code.env import Code

from envserver import SandboxConfig
from envserver.sandbox import SandboxService, WatchedSandboxes


@asynccontextmanager
async def code(**settings: Any) -> AsyncIterator[Code]:
    """An instance whose sandboxes end with the block."""
    environment = Code(Code.Config(**settings))
    async with SandboxService(SandboxConfig(concurrent=8)) as service:
        environment.sandboxes = WatchedSandboxes(service.address)
        yield environment
