"""The HTTP API: the native routes under /v1, the Atropos protocol at the root, health.

`app.create_api` builds the application over an open store; `server.serve_api` serves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from ..http.access import create_token
    from ..http.health import Metrics
    from ..http.server import serve_api
    from ..runners.validation import Stream
    from .app import create_api

__all__ = ["Metrics", "Stream", "create_api", "create_token", "serve_api"]

__getattr__ = lazy_names(
    __name__,
    {
        "Metrics": "metrics",
        "Stream": "runners.validation",
        "create_api": "app",
        "create_token": "access.tokens",
        "serve_api": "server",
    },
)
