"""Sandboxes for tests: a service of its own, and a client of it."""

from __future__ import annotations

import io
import tarfile
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


def archive(**files: bytes) -> bytes:
    """A compressed archive of `files`; a double underscore in a name stands for a slash."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/"))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()
