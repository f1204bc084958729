"""The settings of `envserver models start`."""

from __future__ import annotations

from pydantic import Field

from ...config import EngineConfig, LogLevel, Section
from ..command_line import CommandSpec

SUMMARY = """Starts an engine for a model: vLLM where it is installed and comes up, else the local
one, and says why. Prints its address when it answers; starts it again when it dies; ends it with
itself. NAME is a name in models.yaml, a folder, or a name on the hub."""


ALIASES = {
    name: f"engine.{name}"
    for name in (
        *("models_file", "backend", "port", "vllm_python", "vllm_args", "local_args"),
        *("start_seconds", "restarts", "log"),
    )
}


class StartSettings(Section):
    """The settings that `models start` has."""

    name: str = Field(default="", min_length=0)
    """Which model; may also stand first, without its name."""
    log_level: LogLevel = "info"
    """Least serious event that is logged."""
    engine: EngineConfig = EngineConfig()


COMMAND = CommandSpec(
    "models start", SUMMARY, StartSettings, usage="NAME", arguments=("name",), aliases=ALIASES
)
