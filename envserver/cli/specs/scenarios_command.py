"""The settings of `envserver scenarios`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Settings
from ..command_line import SAMPLING, CommandSpec

SUMMARY = """Runs models in a scenario (a folder or YAML file with a prompt, a workspace and
checks) and writes each run as a trace OUT/MODEL/LABEL/run_NNN.json: thoughts, tool calls,
results and the final answer of the protocol THOUGHT / TOOL_CALL / FINAL. Existing runs are not
repeated. Exit status 1: a run failed through no fault of the model."""


class ScenarioSettings(Settings):
    """Settings of `scenarios`."""

    scenario: Path | None = None
    """Scenario: a folder, a YAML file, or the name of one in `scenarios/` or of the sample."""
    all_scenarios: bool = False
    """Run every scenario in the folder `--scenario` (unset: `scenarios`); the traces of each go
    into a folder of its name."""
    models: str
    """Models, separated by commas: names in `engine.models_file`, folders,
    NAME=http://host:port/v1 or only such an address, or sim."""
    n: int = Field(default=20, ge=1)
    """Runs of each model and label."""
    label: str = "gold"
    """Which prompts of the scenario to use, separated by commas."""
    out: Path = Path("traces")
    """Folder for the traces."""
    seed: int = 0
    """Base seed; run N (from 1) uses seed + N."""
    overwrite: bool = False
    """Repeat runs that already have traces."""
    embed: str | None = None
    """Sentence-transformers model that adds an embedding of its text to each step (needs the
    extra `embeddings`); unset: no embeddings."""
    embed_cache: Path = Path("data/embeddings")
    """Cache folder for embeddings, keyed by text and model."""


COMMAND = CommandSpec(
    "scenarios",
    SUMMARY,
    ScenarioSettings,
    usage="--models NAME,NAME (--scenario PATH | --all-scenarios)",
    aliases={"max_steps": "env.max_turns"},
    frequent=(
        *("scenario", "all_scenarios", "models", "n", "label", "out", "seed", "overwrite"),
        *("openai.api_key", *SAMPLING, "rollouts.max_concurrent"),
    ),
)
