"""Clients for trainers and data makers that get groups from a server."""

from __future__ import annotations

from envserver_records.wire import GroupSummary

from .http import BatchLimits, EnvClient, NotAllowed, Retries, ServerUnreachable, SyncEnvClient
from .records import Batch, ClientGroup, Row

__all__ = [
    "Batch", "ClientGroup", "EnvClient", "GroupSummary", "NotAllowed", "Retries", "Row",
    "ServerUnreachable", "SyncEnvClient", "BatchLimits",
]  # fmt: skip
