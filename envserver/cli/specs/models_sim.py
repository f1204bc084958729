"""The settings of `envserver models sim`."""

from __future__ import annotations

from pydantic import Field

from ...config import EnvironmentSettings, LoopbackHost, SandboxConfig, SimConfig
from ..command_line import CommandSpec

SUMMARY = """Serves the simulated engine as an OpenAI-compatible server. It is no language model: it
plays the solutions of the tasks of --env, right or spoiled, and babbles without one."""


class ModelsSettings(EnvironmentSettings):
    """The settings that `models sim` has."""

    host: LoopbackHost = "127.0.0.1"
    """Address to listen at; only loopback."""
    port: int = Field(default=9001, ge=0, le=65535)
    """Port; 0 takes a free one."""
    sim: SimConfig = SimConfig()
    sandbox: SandboxConfig = SandboxConfig()


COMMAND = CommandSpec(
    "models sim",
    SUMMARY,
    ModelsSettings,
)
