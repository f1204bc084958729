"""Sandboxes for tests: a service of its own and a client of it, here or as on another machine."""

import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from envserver import SandboxConfig
from envserver.running.run_settings import SandboxesServeSettings
from envserver.running.sandbox_serving import ServedSandboxes, sandbox_serving
from envserver.sandbox.client import SandboxClient
from envserver.sandbox.machines import Machines
from envserver.sandbox.maker import RemoteAddress
from envserver.sandbox.service import SandboxService
from envserver.settings.config import SandboxMachineConfig
from envserver.settings.server import ServerConfig


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


@asynccontextmanager
async def sandbox_machine(
    tokens_file: Path | None = None, **config: Any
) -> AsyncIterator[ServedSandboxes]:
    """What `envserver sandboxes serve` runs, in this process. `config`: of its sandboxes."""
    settings = SandboxesServeSettings(
        server=ServerConfig(port=0, tokens_file=tokens_file),
        sandbox=SandboxMachineConfig.model_validate(config),
    )
    async with sandbox_serving(settings) as served:
        yield served


@asynccontextmanager
async def sandboxes_elsewhere(**config: Any) -> AsyncIterator[Machines]:
    """A client of a machine of its own, as `sandboxes` is of a service."""
    async with (
        sandbox_machine(**config) as served,
        Machines(RemoteAddress((served.url,))) as machines,
    ):
        yield machines


def archive(packing: str = "gz", /, **files: bytes) -> bytes:
    """A compressed archive of `files`; a double underscore in a name stands for a slash."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{packing}") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/"))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()
