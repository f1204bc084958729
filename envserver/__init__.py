"""envserver hosts environments in which language-model agents are trained and their data is made.

These names are public; everything below the package may change. They are imported when first used,
so that `import envserver` (and `envserver --help`) costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "Environment": "envserver.environment",
    "AgentRole": "envserver.environment",
    "EnvironmentConfig": "envserver.config",
    "Reply": "envserver.environment",
    "Rollout": "envserver.environment",
    "Isolation": "envserver.environment",
    "KnownResult": "envserver.environment",
    "Sandbox": "envserver.sandbox_interface",
    "BlockingSandbox": "envserver.sandbox_interface",
    "Sandboxes": "envserver.sandbox_interface",
    "Caller": "envserver.environment",
    "Service": "envserver.environment",
    "Services": "envserver.environment",
    "Task": "envserver_records",
    "PublicTask": "envserver_records",
    "Result": "envserver_records",
    "Score": "envserver_records",
    "Sequence": "envserver_records",
    "Trajectory": "envserver_records",
    "Group": "envserver_records",
    "Message": "envserver_records",
    "Split": "envserver_records",
    "SandboxLimits": "envserver_records",
    "SandboxSpec": "envserver_records",
    "SandboxUsage": "envserver_records",
    "ExecResult": "envserver_records",
    "pack": "envserver_records",
    "unpack": "envserver_records",
    "EnvserverError": "envserver_records",
    "Failure": "envserver_records",
    "ConfigError": "envserver_records",
    "ConflictError": "envserver_records",
    "InputError": "envserver_records",
    "NotFoundError": "envserver_records",
    "StoreError": "envserver_records",
    "LimitReached": "envserver_records",
    "AgentError": "envserver_records",
    "EngineError": "envserver_records",
    "EngineGarbage": "envserver_records",
    "EngineRefused": "envserver_records",
    "EngineTimeout": "envserver_records",
    "EngineUnavailable": "envserver_records",
    "ScorerError": "envserver_records",
    "SandboxError": "envserver_records",
    "ServiceError": "envserver_records",
    "pass_at_k": "envserver.evaluation",
    "pass_hat_k": "envserver.evaluation",
    "main": "envserver.cli",
    "process": "envserver.running.blocking",
    "groups": "envserver.running.blocking",
    "serve": "envserver.running.blocking",
    "evaluate": "envserver.running.blocking",
    "score": "envserver.running.blocking",
    "rescore": "envserver.running.blocking",
    "replay": "envserver.running.blocking",
    "verify": "envserver.running.blocking",
    "ProcessSettings": "envserver.running.run_settings",
    "EvaluateSettings": "envserver.running.run_settings",
    "ScoreSettings": "envserver.running.run_settings",
    "RescoreSettings": "envserver.running.run_settings",
    "ReplaySettings": "envserver.running.run_settings",
    "VerifySettings": "envserver.running.run_settings",
    "ProcessResult": "envserver.running.python_api",
    "ScoreResult": "envserver.running.python_api",
}

if TYPE_CHECKING:
    from envserver_records.errors import (
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
    from envserver_records.records import (
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

    from . import aio
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
        Service,
        Services,
    )
    from .evaluation import pass_at_k, pass_hat_k
    from .running.blocking import (
        evaluate,
        groups,
        process,
        replay,
        rescore,
        score,
        serve,
        verify,
    )
    from .running.python_api import ProcessResult, ScoreResult
    from .running.run_settings import (
        EvaluateSettings,
        ProcessSettings,
        ReplaySettings,
        RescoreSettings,
        ScoreSettings,
        VerifySettings,
    )
    from .sandbox_interface import BlockingSandbox, Sandbox, Sandboxes

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
    "BlockingSandbox",
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
    "aio",
    "process",
    "groups",
    "serve",
    "evaluate",
    "score",
    "rescore",
    "replay",
    "verify",
    "EvaluateSettings",
    "ProcessSettings",
    "ReplaySettings",
    "RescoreSettings",
    "ScoreSettings",
    "VerifySettings",
    "ProcessResult",
    "ScoreResult",
]


def __getattr__(name: str) -> Any:
    if name == "aio":
        return importlib.import_module("envserver.aio")
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
