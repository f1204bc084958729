"""Sandboxes for the tests of environments."""

from collections.abc import AsyncIterator

import pytest_asyncio

from envserver import SandboxConfig, Sandboxes
from envserver.sandbox.opening import WatchedSandboxes
from envserver.sandbox.service import SandboxService


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rooms() -> AsyncIterator[Sandboxes]:
    """The sandboxes of one service, as the server has them; usable from every event loop."""
    async with SandboxService(SandboxConfig(concurrent=8)) as service:
        yield WatchedSandboxes(service.address)
