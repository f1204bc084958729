"""Durable groups, leases, runs and small values. What was accepted is never lost.

Groups go in as opaque bytes with the few numbers that batching needs, and come out under leases.
`interface.py` says what a store is; `sql.py` implements it for SQLite and PostgreSQL. The database
library is imported when `Store` or `open_store` is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .interface import GroupStore
from .rows import (
    ATROPOS_RUN,
    UNKNOWN_VERSION,
    Checkpoint,
    Compacted,
    DamagedGroup,
    Delivery,
    GroupPut,
    GroupRow,
    Lease,
    Run,
)
from .states import GroupState, RunState

if TYPE_CHECKING:
    from .opening import open_store
    from .sql import Store

__all__ = [
    "ATROPOS_RUN",
    "UNKNOWN_VERSION",
    "Checkpoint",
    "Compacted",
    "DamagedGroup",
    "Delivery",
    "GroupPut",
    "GroupRow",
    "GroupStore",
    "GroupState",
    "Lease",
    "Run",
    "RunState",
    "Store",
    "open_store",
]


def __getattr__(name: str) -> Any:
    modules = {"Store": ".sql", "open_store": ".opening"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(modules[name], __name__), name)
    globals()[name] = value
    return value
