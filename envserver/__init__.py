"""envserver hosts environments in which language-model agents are trained and their data is made.

These names are public; everything below the package may change. They are imported when first used,
so that `import envserver` (and `envserver --help`) costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Environment": "environment",
    "AgentRole": "environment",
    "EnvironmentConfig": "config",
    "Reply": "environment",
    "Rollout": "environment",
    "Isolation": "environment",
    "KnownResult": "environment",
    "Sandbox": "environment",
    "Sandboxes": "environment",
    "Caller": "environment",
    "Service": "environment",
    "Services": "environment",
    "Task": "records",
    "PublicTask": "records",
    "Result": "records",
    "Score": "records",
    "Sequence": "records",
    "Trajectory": "records",
    "Group": "records",
    "Message": "records",
    "Split": "records",
    "SandboxLimits": "records",
    "SandboxSpec": "records",
    "SandboxUsage": "records",
    "ExecResult": "records",
    "pack": "records",
    "unpack": "records",
    "EnvserverError": "errors",
    "Failure": "errors",
    "ConfigError": "errors",
    "ConflictError": "errors",
    "InputError": "errors",
    "NotFoundError": "errors",
    "StoreError": "errors",
    "LimitReached": "errors",
    "AgentError": "errors",
    "EngineError": "errors",
    "EngineGarbage": "errors",
    "EngineRefused": "errors",
    "EngineTimeout": "errors",
    "EngineUnavailable": "errors",
    "ScorerError": "errors",
    "SandboxError": "errors",
    "ServiceError": "errors",
    "pass_at_k": "evaluation",
    "pass_hat_k": "evaluation",
    "main": "cli",
}

if TYPE_CHECKING:
    from .cli import main
    from .config import EnvironmentConfig
    from .environment import (
        AgentRole,
        Caller,
        Environment,
        Isolation,
        KnownResult,
        Reply,
        Rollout,
        Sandbox,
        Sandboxes,
        Service,
        Services,
    )
    from .errors import (
        AgentError,
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
        LimitReached,
        NotFoundError,
        SandboxError,
        ScorerError,
        ServiceError,
        StoreError,
    )
    from .evaluation import pass_at_k, pass_hat_k
    from .records import (
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
        pack,
        unpack,
    )

__all__ = [
    "__version__",
    "Environment",
    "AgentRole",
    "EnvironmentConfig",
    "Reply",
    "Rollout",
    "Isolation",
    "KnownResult",
    "Sandbox",
    "Sandboxes",
    "Caller",
    "Service",
    "Services",
    "SandboxLimits",
    "SandboxSpec",
    "SandboxUsage",
    "ExecResult",
    "Task",
    "PublicTask",
    "Result",
    "Score",
    "Sequence",
    "Trajectory",
    "Group",
    "Message",
    "Split",
    "pack",
    "unpack",
    "EnvserverError",
    "Failure",
    "ConfigError",
    "ConflictError",
    "InputError",
    "NotFoundError",
    "StoreError",
    "LimitReached",
    "AgentError",
    "EngineError",
    "EngineGarbage",
    "EngineRefused",
    "EngineTimeout",
    "EngineUnavailable",
    "ScorerError",
    "SandboxError",
    "ServiceError",
    "pass_at_k",
    "pass_hat_k",
    "main",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
