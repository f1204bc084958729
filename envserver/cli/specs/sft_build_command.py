"""The settings of `envserver sft build`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Builds rows for supervised fine-tuning from unified trajectories, one folder for
each tool that has a template: OUT/TOOL/train.jsonl, OUT/TOOL/val.jsonl and OUT/SUMMARY.json. A
row is {"tool", "instruction", "output", "meta"}. The same files, templates and seed give the
same rows."""


class RowSettings(Section):
    """Settings that `sft build` and `sft preview` share."""

    sources: list[str]
    """Files, folders and globs of unified trajectories. Can be given as the first arguments."""
    templates: Path = Path("configs/sft_templates.yaml")
    """YAML file with a template for each tool that gets rows."""
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Minimum reward of a trajectory; if set, trajectories without a reward are left out."""
    context: bool = False
    """Fill {context} with the outputs of the earlier actions; otherwise it is empty, as in the
    original script."""
    notes: bool = False
    """Fill {notes} with the outputs of earlier hops; otherwise it is empty."""
    characters: int = Field(default=4000, ge=1)
    """Maximum length of {context} and of {notes} in characters; the end is kept."""
    form: Literal["rows", "messages"] = "rows"
    """rows: instruction and output; messages: the same as a conversation."""


class BuildSettings(RowSettings):
    """Settings of `sft build`."""

    out: Path = Path("data/sft")
    """Output folder: new, empty, or written by an earlier build, which is replaced."""
    seed: int = 123
    """Shuffle seed."""
    val_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of each tool's rows held out for validation, rounded down, but at least one row."""
    strict_split: bool = False
    """Put a tool's only row into train.jsonl alone; otherwise into both files, as in the
    original script."""
    group_by: Literal["task_id"] | None = None
    """task_id: keep all rows of a task in the same split, across all tools."""
    upload: str | None = None
    """Also upload the folder: to a folder, a bucket (gs://bucket/prefix, any fsspec URL), or the
    hub (hf://datasets/OWNER/NAME)."""


COMMAND = CommandSpec(
    "sft build",
    SUMMARY,
    BuildSettings,
    usage="SOURCE...",
    arguments=("sources",),
    aliases={"unified_glob": "sources"},
)
