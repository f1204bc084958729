"""The settings of `envserver models list`."""

from __future__ import annotations

from pathlib import Path

from ...config import EngineConfig, Section
from ..command_line import CommandSpec

SUMMARY = """Lists the named models, and how each is served and sampled."""


class ListSettings(Section):
    """Settings of `models list`."""

    models_file: Path = EngineConfig().models_file
    """YAML file that names the models."""
    as_json: bool = False
    """Print JSON instead of a table."""


COMMAND = CommandSpec(
    "models list",
    SUMMARY,
    ListSettings,
)
