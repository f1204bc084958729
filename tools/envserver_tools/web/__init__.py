"""The web for agents: search, pages, words in pages; recorded, so that it stays the same.

Code with network access uses `Web` directly; agents without it call the server, which has one `Web`
for all of them (see `serving`).
"""

from __future__ import annotations

from .fetching import FetchLimits, ProviderFailed
from .recording import Metrics, NotRecorded, Recorder, Store
from .serving import KEY_VARIABLE, remote_tools, services_of
from .web import DESCRIPTIONS, LEAK, LEAK_SEEN, Viewer, Web, WebSettings, web_tools

__all__ = [
    "DESCRIPTIONS", "FetchLimits", "Metrics", "NotRecorded", "ProviderFailed", "Recorder", "Store",
    "KEY_VARIABLE", "LEAK", "LEAK_SEEN", "Viewer", "Web", "WebSettings", "remote_tools",
    "services_of", "web_tools",
]  # fmt: skip
