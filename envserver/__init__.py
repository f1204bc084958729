"""envserver hosts environments in which language-model agents are trained and their data is made.

These names are public; everything below the package may change. They are imported when first used,
so that `import envserver` (and `envserver --help`) costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

_HOMES = {
    name: home
    for home, names in {
        "envserver.cli": "main",
        "envserver.environment": (
            "Environment AgentRole Isolation KnownResult Caller Service Services"
        ),
        "envserver.evaluation": "pass_at_k pass_hat_k",
        "envserver.integration_interface": "Backend Integration",
        "envserver.judge_interface": "Judge JudgeReply",
        "envserver.judges.judge": (
            "rubric_marks pairwise_ranking Ranking judge_bias rubric_bias JudgeBias JudgeCase"
        ),
        "envserver.rollout_interface": "Reply Rollout HarnessTask ModelCall",
        "envserver.rows.environment": "from_rows",
        "envserver.rows.typed_tasks": "Hidden",
        "envserver.running.blocking": "process groups serve evaluate score rescore replay verify",
        "envserver.running.python_api": "ProcessResult ScoreResult",
        "envserver.running.ray_trainer": "ray_server RayServer",
        "envserver.running.run_settings": (
            "ProcessSettings EvaluateSettings ScoreSettings RescoreSettings ReplaySettings "
            "VerifySettings"
        ),
        "envserver.sandbox_interface": "Sandbox BlockingSandbox Sandboxes",
        "envserver.settings.config": (
            "MixSettings OpenAIConfig RolloutsConfig SamplingConfig SandboxConfig Settings "
            "SimConfig TokensConfig WorkersConfig"
        ),
        "envserver.settings.runs": "CurriculumConfig",
        "envserver.settings.section": "EnvironmentConfig",
        "envserver.settings.server": "ServerConfig",
        "envserver.tools.calling": "LoopEnd Tool ToolError",
        "envserver.tools.mcp_client": "McpServer",
        "envserver.tools.typed": "tool",
        "envserver.workers.companions": "Companion take_companion",
        "envserver_records": (
            "Task PublicTask Result Score TurnReward RewardRange Sequence Trajectory Group "
            "Message Split SandboxLimits SandboxSpec SandboxUsage ExecResult pack unpack "
            "EnvserverError Failure ConfigError ConflictError InputError NotFoundError "
            "StoreError LimitReached AgentError EngineError EngineGarbage EngineRefused "
            "EngineTimeout EngineUnavailable ScorerError RewardError SandboxError ServiceError "
            "JudgeError"
        ),
    }.items()
    for name in names.split()
}
"""The module of each public name."""

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
        JudgeError,
        LimitReached,
        NotFoundError,
        RewardError,
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
    from envserver_records.tasks import RewardRange, TurnReward

    from . import aio
    from .cli import main
    from .environment import (
        AgentRole,
        Caller,
        Environment,
        Isolation,
        KnownResult,
        Service,
        Services,
    )
    from .evaluation import pass_at_k, pass_hat_k
    from .integration_interface import Backend, Integration
    from .judge_interface import Judge, JudgeReply
    from .judges.judge import (
        JudgeBias,
        JudgeCase,
        Ranking,
        judge_bias,
        pairwise_ranking,
        rubric_bias,
        rubric_marks,
    )
    from .rollout_interface import ModelCall, Reply, Rollout
    from .rows.environment import from_rows
    from .rows.typed_tasks import Hidden
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
    from .running.ray_trainer import RayServer, ray_server
    from .running.run_settings import (
        EvaluateSettings,
        ProcessSettings,
        ReplaySettings,
        RescoreSettings,
        ScoreSettings,
        VerifySettings,
    )
    from .sandbox_interface import BlockingSandbox, Sandbox, Sandboxes
    from .settings.config import (
        MixSettings,
        OpenAIConfig,
        RolloutsConfig,
        SamplingConfig,
        SandboxConfig,
        Settings,
        SimConfig,
        TokensConfig,
        WorkersConfig,
    )
    from .settings.runs import CurriculumConfig
    from .settings.section import EnvironmentConfig
    from .settings.server import ServerConfig
    from .tools.calling import LoopEnd, Tool, ToolError
    from .tools.mcp_client import McpServer
    from .tools.typed import tool
    from .workers.companions import Companion, take_companion

__all__ = [
    "__version__", "Environment", "AgentRole", "EnvironmentConfig", "Reply", "Rollout",
    "Isolation", "Companion", "take_companion", "KnownResult", "Hidden", "from_rows", "Sandbox",
    "BlockingSandbox", "Sandboxes", "Caller", "Service", "Services", "LoopEnd", "McpServer",
    "Tool", "ToolError", "tool", "ModelCall", "Backend", "Integration", "SandboxLimits",
    "SandboxSpec", "SandboxUsage", "ExecResult", "Task", "PublicTask", "Result", "Score",
    "TurnReward", "RewardRange", "Sequence", "Trajectory", "Group", "Message", "Split", "pack",
    "unpack", "EnvserverError", "Failure", "ConfigError", "ConflictError", "InputError",
    "NotFoundError", "StoreError", "LimitReached", "AgentError", "EngineError", "EngineGarbage",
    "EngineRefused", "EngineTimeout", "EngineUnavailable", "ScorerError", "RewardError",
    "SandboxError", "ServiceError", "JudgeError", "Judge", "JudgeReply", "rubric_marks",
    "pairwise_ranking", "Ranking", "judge_bias", "rubric_bias", "JudgeBias", "JudgeCase",
    "pass_at_k", "pass_hat_k", "main", "aio", "CurriculumConfig", "MixSettings", "OpenAIConfig",
    "RolloutsConfig", "SamplingConfig", "SandboxConfig", "ServerConfig", "Settings", "SimConfig",
    "TokensConfig", "WorkersConfig", "process", "groups", "serve", "evaluate", "score", "rescore",
    "replay", "verify", "EvaluateSettings", "ProcessSettings", "ReplaySettings", "RescoreSettings",
    "ScoreSettings", "VerifySettings", "ProcessResult", "ScoreResult", "RayServer", "ray_server",
]  # fmt: skip


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
