"""The settings of `envserver models list`."""

from __future__ import annotations

from pathlib import Path

from ...config import EngineConfig, Section
from ..command_line import CommandSpec

SUMMARY = "Shows the models that have names, and how each is served and sampled."


class ListSettings(Section):
    """The settings that `models list` has."""

    models_file: Path = EngineConfig().models_file
    """Where models have their names."""
    as_json: bool = False
    """JSON, not a table."""


COMMAND = CommandSpec(
    "models list",
    SUMMARY,
    ListSettings,
)
