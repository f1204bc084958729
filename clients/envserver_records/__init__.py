"""The records and errors shared by both sides of the wire.

Names are imported when first used: settings and workers do without numpy, which records need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        AgentError,
        AllFailed,
        Blame,
        ConfigError,
        ConflictError,
        EngineError,
        EngineGarbage,
        EngineRefused,
        EngineTimeout,
        EngineUnavailable,
        EnvserverError,
        Failure,
        InputError,
        JudgeError,
        LimitReached,
        NotFoundError,
        Outcome,
        RewardError,
        RolloutError,
        SandboxError,
        ScorerError,
        ServiceError,
        StoreError,
    )
    from .records import Call, Group, Sequence, Trajectory, Usage, pack, unpack
    from .sandboxes import ExecResult, SandboxLimits, SandboxSpec, SandboxUsage
    from .tasks import Message, PublicTask, Result, RewardRange, Score, Split, Task, TurnReward

__all__ = [
    "AgentError", "AllFailed", "Blame", "Call", "ConfigError", "ConflictError", "EngineError",
    "EngineGarbage", "EngineRefused", "EngineTimeout", "EngineUnavailable", "EnvserverError",
    "ExecResult", "Failure", "Group", "InputError", "JudgeError", "LimitReached", "Message",
    "NotFoundError", "Outcome", "PublicTask", "Result", "RewardError", "RewardRange",
    "RolloutError", "SandboxError", "SandboxLimits", "SandboxSpec", "SandboxUsage", "Score",
    "ScorerError", "Sequence", "ServiceError", "Split", "StoreError", "Task", "Trajectory",
    "TurnReward", "Usage", "pack", "unpack",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = ("errors", "sandboxes", "tasks", "records")  # the last one imports numpy
    modules = (importlib.import_module(f".{home}", __name__) for home in homes)
    value = globals()[name] = next(
        getattr(module, name) for module in modules if hasattr(module, name)
    )
    return value
