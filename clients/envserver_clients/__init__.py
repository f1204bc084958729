"""For trainers and data makers: what they use to get groups from a server.

`http` has the clients and how a trainer uses them, `records` what they return; `adapters`,
`weights` and the commands (`grpo`, `sft`, `dpo`, `vertex`) need the extras of this package.
"""

from __future__ import annotations

from envserver_records.wire import GroupSummary

from .http import EnvClient, NotAllowed, Retries, ServerUnreachable, SyncEnvClient, Wanted
from .records import Batch, ClientGroup, Row

__all__ = [
    "Batch",
    "ClientGroup",
    "EnvClient",
    "GroupSummary",
    "NotAllowed",
    "Retries",
    "Row",
    "ServerUnreachable",
    "SyncEnvClient",
    "Wanted",
]
