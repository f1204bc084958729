"""Periodic maintenance of the store."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog
from envserver_records.errors import StoreError

from ..server_config import RetentionConfig
from ..store import GroupStore

log = structlog.get_logger(__name__)

_SECONDS: Final = 300.0
_FULL_SECONDS: Final = 5.0
"""Seconds between looks at a full disk."""


async def remove_old(store: GroupStore, retention: RetentionConfig) -> None:
    """Deletes groups that were delivered long ago, every few minutes until cancelled; retries when
    the store fails. While the disk is full, deletes at once all that no run can go back to.
    """
    due = time.monotonic() + _SECONDS
    while True:
        await asyncio.sleep(_FULL_SECONDS)
        is_full = bool(store.disk_problem)
        if not is_full and time.monotonic() < due:
            continue
        due = time.monotonic() + _SECONDS
        try:
            removed = await store.compact(
                acked_hours=retention.acked_hours, max_gb=0.0 if is_full else retention.max_gb
            )
        except StoreError as error:
            log.error("retention_failed", error=str(error))
            continue
        if removed.groups or removed.leases:
            log.info(
                "store_compacted",
                groups=removed.groups,
                stored_bytes=removed.stored_bytes,
                leases=removed.leases,
            )
