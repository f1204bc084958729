"""The settings of `envserver models start`."""

from __future__ import annotations

from pydantic import Field

from ...config import EngineConfig, LogFormat, LogLevel, Section
from ..command_line import CommandSpec

SUMMARY = """Starts an engine for a model: vLLM if it is installed and starts, else the local
engine, and says why. Prints the address when the engine is ready, restarts the engine when it
dies, and stops it on exit. NAME is a name in models.yaml, a folder, or a name on the hub."""


ALIASES = {
    name: f"engine.{name}"
    for name in (
        *("models_file", "backend", "port", "vllm_python", "vllm_args", "local_args"),
        *("start_seconds", "restarts", "log"),
    )
}


class StartSettings(Section):
    """Settings of `models start`."""

    name: str = Field(default="", min_length=0)
    """Name of the model. Can be given as the first argument."""
    log_level: LogLevel = "info"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""
    engine: EngineConfig = EngineConfig()


COMMAND = CommandSpec(
    "models start",
    SUMMARY,
    StartSettings,
    usage="NAME",
    arguments=("name",),
    aliases=ALIASES,
    frequent=(
        *("name", "engine.backend", "engine.port", "engine.vllm_args", "engine.local_args"),
        *("engine.models_file", "engine.start_seconds", "engine.log"),
    ),
)
