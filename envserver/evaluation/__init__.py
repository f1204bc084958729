"""Turns attempts at tasks into reports: estimates, intervals, comparisons. Pure functions."""

from __future__ import annotations

from .estimators import pass_at_k, pass_hat_k

__all__ = ["pass_at_k", "pass_hat_k"]
