"""The web for agents: search, pages, words in pages; recorded, so that it stays the same.

Whoever has a network of its own uses `Web` directly; agents behind a wall ask the server, which has
one `Web` for all of them.
"""

from __future__ import annotations

from .fetching import FetchLimits, ProviderFailed
from .recording import Metrics, NotRecorded, Recorder, Store
from .web import Viewer, Web, WebSettings, web_tools

__all__ = [
    "FetchLimits",
    "Metrics",
    "NotRecorded",
    "ProviderFailed",
    "Recorder",
    "Store",
    "Viewer",
    "Web",
    "WebSettings",
    "web_tools",
]
