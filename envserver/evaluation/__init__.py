"""From groups to what a model can do: pure functions, from attempts at tasks to a report."""

from __future__ import annotations

from .estimators import pass_at_k, pass_hat_k

__all__ = ["pass_at_k", "pass_hat_k"]
