"""The settings of `envserver evaluate merge`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Makes one evaluation of several shards, which `evaluate --shard 1/4` and so on made at
the same time or on several machines. The report is that of one run over all tasks. Shards with
other settings or another model, a task that is in two of them, and missing or unfinished shards
are refused."""


class MergeSettings(Section):
    """Settings of `evaluate merge`."""

    shards: list[Path] = Field(default_factory=list)
    """Folders of the shards; may be given without the flag."""
    out: Path
    """Folder for the merged groups and the report."""
    slices: list[str] = Field(default_factory=list)
    """Environment settings in which shards may differ, such as data_path where each evaluated a
    file of its own."""
    partial: bool = False
    """Accept that shards are missing or unfinished; the report says that it is not complete."""
    overwrite: bool = False
    """Replace an evaluation in the output folder."""


COMMAND = CommandSpec(
    "evaluate merge",
    SUMMARY,
    MergeSettings,
    usage="SHARD SHARD ... --out DIR",
    arguments=("shards",),
)
