"""Rewards of a conversation: tau2-bench's, and a stricter one."""

from __future__ import annotations

from .checks import Strictness, action_matches, information_given, pass_hat_ks, same_call
from .rewards import (
    EVALUATION_TYPES,
    Evaluation,
    EvaluationError,
    EvaluationType,
    MissingVerdicts,
    evaluate,
)

__all__ = [
    "EVALUATION_TYPES",
    "Evaluation",
    "EvaluationError",
    "EvaluationType",
    "MissingVerdicts",
    "Strictness",
    "action_matches",
    "evaluate",
    "information_given",
    "pass_hat_ks",
    "same_call",
]
