"""Limits what posted groups may wait: number and bytes of the longest queue.

In: posts of groups. Out: each post, or 429 with `Retry-After` while too much waits. The limits are
exceeded by the posts under way, and that of bytes by those of a quarter of a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from envserver_records.errors import UsageError
from starlette.requests import Request
from starlette.responses import Response

from ..settings.server import ServerConfig
from ..store import GroupStore
from .transfer import Endpoint

_LOOK_SECONDS: Final = 0.25
_RETRY_SECONDS: Final = 5


class QueueFull(UsageError):
    """Too much waits for a run; `detail["retry_after_seconds"]` says when to retry."""

    kind, status = "queue_full", 429


class QueueLimit:
    """The limit of one server; see `ServerConfig.max_waiting_groups` and `max_waiting_gb`."""

    def __init__(self, store: GroupStore, settings: ServerConfig) -> None:
        self._store = store
        self._most_groups = settings.max_waiting_groups
        self._most_bytes = settings.max_waiting_gb * 1e9
        self._bytes = 0
        self._looked_at = -_LOOK_SECONDS

    def limited(self, endpoints: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
        """Returns the endpoints, which answer 429 while too much waits."""
        return {path: self._limited(endpoint) for path, endpoint in endpoints.items()}

    def _limited(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            await self._check()
            return await endpoint(request)

        answer.__doc__ = endpoint.__doc__  # for the OpenAPI document
        return answer

    async def _check(self) -> None:
        groups = self._store.most_waiting()
        if groups >= self._most_groups:
            raise self._full(f"{groups} groups", "max_waiting_groups", self._most_groups)
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            # What waits is a part of what is kept, whose size is known without a query.
            is_close = self._store.stored_bytes >= self._most_bytes
            self._bytes = await self._store.most_waiting_bytes() if is_close else 0
        if self._bytes >= self._most_bytes:
            raise self._full(
                f"Groups of {self._bytes / 1e9:.3g} GB", "max_waiting_gb", self._most_bytes / 1e9
            )

    def _full(self, waiting: str, setting: str, most: float) -> QueueFull:
        return QueueFull(
            f"{waiting} wait for a run, and --server.{setting} is {most:g}: nothing was stored.",
            hint="Retry once trainers have leased some groups, or close runs that lease nothing.",
            retry_after_seconds=_RETRY_SECONDS,
        )
