"""Which wall stands around the sandboxes of this server."""

from __future__ import annotations

from ..config import SandboxConfig


async def choose_wall(config: SandboxConfig) -> str:
    """The wall that `config` asks for, or the first that works here.

    Raises:
        ConfigError: none that is allowed can be made; the message names what failed.
    """
    return "namespace" if config.wall == "auto" else config.wall


def outer_command(wall: str) -> list[str]:
    """Words before a zygote's own command that make its outer wall."""
    return []
