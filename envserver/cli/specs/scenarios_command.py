"""The settings of `envserver scenarios`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Settings
from ..command_line import CommandSpec

SUMMARY = """Runs models in a scenario (a folder or YAML file with a prompt, a workspace and checks)
and writes each run as a trace OUT/MODEL/LABEL/run_NNN.json: thoughts, tool calls, results and the
final answer of the protocol THOUGHT / TOOL_CALL / FINAL. Runs that are there are not made again.
Exit status 1 where a run failed by no fault of the model."""


class ScenarioSettings(Settings):
    """Settings with the flags that only `scenarios` has."""

    scenario: Path
    """Folder or YAML file."""
    models: str
    """Names of models, with commas: of `engine.models_file`, folders, NAME=http://host:port/v1 or
    such an address alone, or sim."""
    n: int = Field(default=20, ge=1)
    """Runs of each model and label."""
    label: str = "gold"
    """Which of the scenario's prompts; several with commas."""
    out: Path = Path("traces")
    """Folder for the traces."""
    seed: int = 0
    """Of run N it is this + N, from 1 on."""
    overwrite: bool = False
    """Make runs again whose traces are there."""
    embed: str | None = None
    """Add an embedding of its text to each step: a model of sentence-transformers (extra
    `embeddings`); unset: none."""
    embed_cache: Path = Path("data/embeddings")
    """Folder where embeddings are kept by their text and model."""


COMMAND = CommandSpec("scenarios", SUMMARY, ScenarioSettings, usage="--models NAME,NAME")
