"""The settings of `envserver models sim`."""

from __future__ import annotations

from pydantic import Field

from ...config import EnvironmentSettings, SandboxConfig, SimConfig
from ...server_config import LoopbackHost
from ..command_line import CommandSpec

SUMMARY = """Serves the simulated engine as an OpenAI-compatible server. It is not a language
model: it plays correct or spoiled solutions of the tasks of --env, and random text without
--env."""


class ModelsSettings(EnvironmentSettings):
    """Settings of `models sim`."""

    host: LoopbackHost = "127.0.0.1"
    """Address to listen on; only loopback addresses."""
    port: int = Field(default=9001, ge=0, le=65535)
    """Port; 0 chooses a free port."""
    sim: SimConfig = SimConfig()
    sandbox: SandboxConfig = SandboxConfig()


COMMAND = CommandSpec(
    "models sim",
    SUMMARY,
    ModelsSettings,
    usage="[--env NAME]",
    frequent=(
        *("environment", "host", "port", "sim.solve_probability", "sim.openers"),
        *("sim.latency_seconds", "sim.seed", "log_level"),
    ),
)
