"""Runs agents in isolated processes on this machine, behind one interface (`pool.WorkerPool`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .local import LocalPool
    from .messages import WorkerSandbox
    from .pool import Assignment

__all__ = ["Assignment", "LocalPool", "WorkerSandbox"]

__getattr__ = lazy_names(
    __name__, {"Assignment": "pool", "LocalPool": "local", "WorkerSandbox": "messages"}
)
