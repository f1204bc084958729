"""Durable groups, leases, runs and small values. What was accepted is never lost.

The database library is imported when `Store` or `open_store` is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .rows import (
    ATROPOS_RUN,
    UNKNOWN_VERSION,
    Checkpoint,
    Compacted,
    DamagedGroup,
    Delivery,
    GroupPut,
    GroupRow,
    GroupState,
    Lease,
    Run,
    RunState,
)

if TYPE_CHECKING:
    from .sql import Store, open_store

__all__ = [
    "ATROPOS_RUN", "UNKNOWN_VERSION", "Checkpoint", "Compacted", "DamagedGroup", "Delivery",
    "GroupPut", "GroupRow", "GroupState", "Lease", "Run", "RunState", "Store", "open_store",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in ("Store", "open_store"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".sql", __name__), name)
