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
    "EnvironmentConfig": "envserver.environment_config",
    "Hidden": "envserver.typed_tasks",
    "Reply": "envserver.rollout_interface",
    "Rollout": "envserver.rollout_interface",
    "Isolation": "envserver.environment",
    "Companion": "envserver.companions",
    "take_companion": "envserver.companions",
    "KnownResult": "envserver.environment",
    "Sandbox": "envserver.sandbox_interface",
    "BlockingSandbox": "envserver.sandbox_interface",
    "Sandboxes": "envserver.sandbox_interface",
    "Caller": "envserver.environment",
    "Service": "envserver.environment",
    "Services": "envserver.environment",
    "LoopEnd": "envserver.tools.calling",
    "McpServer": "envserver.tools.mcp_client",
    "Tool": "envserver.tools.calling",
    "ToolError": "envserver.tools.calling",
    "tool": "envserver.tools.typed",
    "HarnessTask": "envserver.harness_interface",
    "ModelCall": "envserver.hook_interface",
    "Backend": "envserver.integration_interface",
    "Integration": "envserver.integration_interface",
    "Task": "envserver_records",
    "PublicTask": "envserver_records",
    "Result": "envserver_records",
    "Score": "envserver_records",
    "TurnReward": "envserver_records",
    "RewardRange": "envserver_records",
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
    "RewardError": "envserver_records",
    "SandboxError": "envserver_records",
    "ServiceError": "envserver_records",
    "JudgeError": "envserver_records",
    "Judge": "envserver.judge_interface",
    "JudgeReply": "envserver.judge_interface",
    "rubric_marks": "envserver.judges.rubric",
    "pairwise_ranking": "envserver.judges.pairwise",
    "Ranking": "envserver.judges.pairwise",
    "judge_bias": "envserver.judges.bias",
    "rubric_bias": "envserver.judges.bias",
    "JudgeBias": "envserver.judges.bias",
    "JudgeCase": "envserver.judges.bias",
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
    "CurriculumConfig": "envserver.curriculum_config",
    "MixSettings": "envserver.config",
    "OpenAIConfig": "envserver.config",
    "RolloutsConfig": "envserver.config",
    "SamplingConfig": "envserver.config",
    "SandboxConfig": "envserver.config",
    "ServerConfig": "envserver.server_config",
    "Settings": "envserver.config",
    "SimConfig": "envserver.config",
    "TokensConfig": "envserver.tokens_config",
    "WorkersConfig": "envserver.config",
    "ScoreResult": "envserver.running.python_api",
    "ray_server": "envserver.running.ray_trainer",
    "RayServer": "envserver.running.ray_trainer",
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
    from envserver_records.scores import RewardRange, TurnReward

    from . import aio
    from .cli import main
    from .companions import Companion, take_companion
    from .config import (
        MixSettings,
        OpenAIConfig,
        RolloutsConfig,
        SamplingConfig,
        SandboxConfig,
        Settings,
        SimConfig,
        WorkersConfig,
    )
    from .curriculum_config import CurriculumConfig
    from .environment import (
        AgentRole,
        Caller,
        Environment,
        Isolation,
        KnownResult,
        Service,
        Services,
    )
    from .environment_config import EnvironmentConfig
    from .evaluation import pass_at_k, pass_hat_k
    from .hook_interface import ModelCall
    from .integration_interface import Backend, Integration
    from .judge_interface import Judge, JudgeReply
    from .judges.bias import JudgeBias, JudgeCase, judge_bias, rubric_bias
    from .judges.pairwise import Ranking, pairwise_ranking
    from .judges.rubric import rubric_marks
    from .rollout_interface import Reply, Rollout
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
    from .server_config import ServerConfig
    from .tokens_config import TokensConfig
    from .tools.calling import LoopEnd, Tool, ToolError
    from .tools.mcp_client import McpServer
    from .tools.typed import tool
    from .typed_tasks import Hidden

__all__ = [
    "__version__",
    "Environment",
    "AgentRole",
    "EnvironmentConfig",
    "Reply",
    "Rollout",
    "Isolation",
    "Companion",
    "take_companion",
    "KnownResult",
    "Hidden",
    "Sandbox",
    "BlockingSandbox",
    "Sandboxes",
    "Caller",
    "Service",
    "Services",
    "LoopEnd",
    "McpServer",
    "Tool",
    "ToolError",
    "tool",
    "ModelCall",
    "Backend",
    "Integration",
    "SandboxLimits",
    "SandboxSpec",
    "SandboxUsage",
    "ExecResult",
    "Task",
    "PublicTask",
    "Result",
    "Score",
    "TurnReward",
    "RewardRange",
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
    "RewardError",
    "SandboxError",
    "ServiceError",
    "JudgeError",
    "Judge",
    "JudgeReply",
    "rubric_marks",
    "pairwise_ranking",
    "Ranking",
    "judge_bias",
    "rubric_bias",
    "JudgeBias",
    "JudgeCase",
    "pass_at_k",
    "pass_hat_k",
    "main",
    "aio",
    "CurriculumConfig",
    "MixSettings",
    "OpenAIConfig",
    "RolloutsConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ServerConfig",
    "Settings",
    "SimConfig",
    "TokensConfig",
    "WorkersConfig",
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
    "RayServer",
    "ray_server",
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
