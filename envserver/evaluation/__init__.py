"""Turns attempts at tasks into reports: estimates, intervals, comparisons. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .estimators import pass_at_k, pass_hat_k
    from .report import Rules, report_run
    from .results import AttemptResult, TaskResult

__all__ = ["AttemptResult", "Rules", "TaskResult", "pass_at_k", "pass_hat_k", "report_run"]

__getattr__ = lazy_names(
    __name__,
    {
        "AttemptResult": "results",
        "Rules": "report",
        "TaskResult": "results",
        "pass_at_k": "estimators",
        "pass_hat_k": "estimators",
        "report_run": "report",
    },
)
