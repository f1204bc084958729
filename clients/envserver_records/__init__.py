"""The records and errors shared by both sides of the wire.

`envserver` and `envserver_clients` take both from here; this package imports neither. The names
are imported when first used: settings need the errors, but not numpy, which the records need.
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
    from .records import (
        Call,
        ExecResult,
        Group,
        Message,
        PublicTask,
        Result,
        SandboxLimits,
        SandboxSpec,
        SandboxUsage,
        Score,
        Sequence,
        Split,
        Task,
        Trajectory,
        Usage,
        pack,
        unpack,
    )
    from .scores import RewardRange, TurnReward

__all__ = [
    "AgentError",
    "AllFailed",
    "Blame",
    "Call",
    "ConfigError",
    "ConflictError",
    "EngineError",
    "EngineGarbage",
    "EngineRefused",
    "EngineTimeout",
    "EngineUnavailable",
    "EnvserverError",
    "ExecResult",
    "Failure",
    "Group",
    "InputError",
    "JudgeError",
    "LimitReached",
    "Message",
    "NotFoundError",
    "Outcome",
    "PublicTask",
    "Result",
    "RewardError",
    "RewardRange",
    "RolloutError",
    "SandboxError",
    "SandboxLimits",
    "SandboxSpec",
    "SandboxUsage",
    "Score",
    "ScorerError",
    "Sequence",
    "ServiceError",
    "Split",
    "StoreError",
    "Task",
    "Trajectory",
    "TurnReward",
    "Usage",
    "pack",
    "unpack",
]

_ERRORS = {
    "AgentError",
    "AllFailed",
    "Blame",
    "ConfigError",
    "ConflictError",
    "EngineError",
    "EngineGarbage",
    "EngineRefused",
    "EngineTimeout",
    "EngineUnavailable",
    "EnvserverError",
    "Failure",
    "InputError",
    "JudgeError",
    "LimitReached",
    "NotFoundError",
    "Outcome",
    "RewardError",
    "RolloutError",
    "SandboxError",
    "ScorerError",
    "ServiceError",
    "StoreError",
}

_SCORES = {"RewardRange", "TurnReward"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = ".errors" if name in _ERRORS else ".scores" if name in _SCORES else ".records"
    module = importlib.import_module(home, __name__)
    value = getattr(module, name)
    globals()[name] = value
    return value
