"""The settings of `envserver sft preview`."""

from __future__ import annotations

from pydantic import Field

from ..command_line import CommandSpec
from .sft_build_command import RowSettings

SUMMARY = """Shows the first rows of each tool that `sft build` would make of unified trajectories,
and which tools have no template. Nothing is written."""


class PreviewSettings(RowSettings):
    """The settings that `sft preview` has."""

    tool: str | None = None
    """Only rows of this tool; unset: of each."""
    n: int = Field(default=1, ge=1)
    """Rows of each tool."""
    trajectories: int = Field(default=1000, ge=1)
    """Read no more trajectories than these."""
    width: int = Field(default=1000, ge=20)
    """Characters of an instruction and of an output that are shown."""
    as_json: bool = False
    """Print the rows as JSONL, whole, in the order of the trajectories, and nothing else."""


COMMAND = CommandSpec(
    "sft preview",
    SUMMARY,
    PreviewSettings,
    usage="SOURCE...",
    arguments=("sources",),
    aliases={"unified_glob": "sources"},
)
