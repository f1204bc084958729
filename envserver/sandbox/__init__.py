"""Runs programs that a model wrote: without network, away from the server's files, with limits.

Invariants: a sandbox ends with the connection that opened it, and all sandboxes end with the
server; if no backend holds, nothing starts. README.md names the files in reading order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .client import SandboxClient
    from .docker import find_engine
    from .maker import WatchedSandboxes
    from .requests import Open
    from .service import SandboxService

__all__ = ["Open", "SandboxClient", "SandboxService", "WatchedSandboxes", "find_engine"]

__getattr__ = lazy_names(
    __name__,
    {
        "Open": "requests",
        "SandboxClient": "client",
        "SandboxService": "service",
        "WatchedSandboxes": "maker",
        "find_engine": "docker",
    },
)
