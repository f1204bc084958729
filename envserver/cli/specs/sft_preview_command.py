"""The settings of `envserver sft preview`."""

from __future__ import annotations

from pydantic import Field

from ..command_line import CommandSpec
from .sft_build_command import RowSettings

SUMMARY = """Shows the first rows of each tool that `sft build` would make from unified
trajectories, and which tools have no template; or, of a folder that `sft build` wrote, the first
rows of each tool there. Nothing is written."""


class PreviewSettings(RowSettings):
    """Settings of `sft preview`."""

    tool: str | None = None
    """Show only rows of this tool; unset: of every tool."""
    n: int = Field(default=1, ge=1)
    """Rows to show for each tool."""
    trajectories: int = Field(default=1000, ge=1)
    """Maximum number of trajectories to read."""
    width: int = Field(default=1000, ge=20)
    """Characters to show of each instruction and output."""
    as_json: bool = False
    """Print only the full rows as JSONL, in the order of the trajectories."""


COMMAND = CommandSpec(
    "sft preview",
    SUMMARY,
    PreviewSettings,
    usage="SOURCE...",
    arguments=("sources",),
    aliases={"unified_glob": "sources", "root": "sources", "limit": "n"},
)
