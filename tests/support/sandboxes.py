"""Sandboxes for tests: a service of its own, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envserver import SandboxConfig
from envserver.sandbox import SandboxClient, SandboxService


@asynccontextmanager
async def sandboxes(
    backend: str = "auto", concurrent: int = 16, image: str = ""
) -> AsyncIterator[SandboxClient]:
    """A connected client; everything ends with the block. `image`: for the backend docker."""
    config: Any = {"backend": backend, "concurrent": concurrent, "docker_image": image}
    async with (
        SandboxService(SandboxConfig.model_validate(config)) as service,
        SandboxClient(service.address) as client,
    ):
        yield client
