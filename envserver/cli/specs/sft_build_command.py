"""The settings of `envserver sft build`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Makes rows for supervised fine-tuning from unified trajectories, one folder for each
tool that has a template: OUT/TOOL/train.jsonl, OUT/TOOL/val.jsonl and OUT/SUMMARY.json. A row is
{"tool", "instruction", "output", "meta"}. The same files, templates and seed give the same rows."""


class RowSettings(Section):
    """What `build` and `preview` have in common."""

    sources: list[str]
    """Files, folders and globs of unified trajectories; may be the first words."""
    templates: Path = Path("configs/sft_templates.yaml")
    """YAML file: which tools become rows, and how."""
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Only trajectories with at least this reward; one without a reward is left out then."""
    context: bool = False
    """Fill {context} with the outputs of the actions before; off, it is empty, as in the original
    script."""
    notes: bool = False
    """Fill {notes} with the outputs of earlier hops; off, it is empty."""
    characters: int = Field(default=4000, ge=1)
    """The most characters of {context} and of {notes}: the last ones."""
    form: Literal["rows", "messages"] = "rows"
    """rows: instruction and output; messages: the same as a conversation."""


class BuildSettings(RowSettings):
    """The settings that `sft build` has."""

    out: Path = Path("data/sft")
    """Folder for the rows; it is new, or empty, or one that was built before and is replaced."""
    seed: int = 123
    """Of the shuffle."""
    val_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of each tool's rows that is held out, rounded down, but at least one row."""
    strict_split: bool = False
    """The lone row of a tool is trained on; else it is in both files, as in the original script."""
    group_by: Literal["task_id"] | None = None
    """task_id: all rows of a task stand on one side, over all tools."""
    upload: str | None = None
    """Also put the folder there: a folder, a bucket (gs://bucket/prefix, any fsspec URL), or the
    hub (hf://datasets/OWNER/NAME)."""


COMMAND = CommandSpec(
    "sft build",
    SUMMARY,
    BuildSettings,
    usage="SOURCE...",
    arguments=("sources",),
    aliases={"unified_glob": "sources"},
)
