"""The settings of `envserver merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Makes a model of others' weights: base + alpha * (rl - sft), or base + alpha * the sum
of weight * (model - base), for several alphas in one pass, a few megabytes in memory. Other methods
(ties, dare_ties, slerp, ...) by mergekit, where it is installed."""


ARITHMETIC = "arithmetic"


class MergeSettings(Section):
    """The settings that `merge` has."""

    base: Path
    """Folder of the model that gets something added; its config, tokenizer and dtypes stay."""
    rl: Path | None = None
    """Folder of a model after reinforcement learning: a model or a LoRA adapter."""
    sft: Path | None = None
    """Folder of what it was before, alike."""
    add: list[str] = Field(default=[])
    """DIR=WEIGHT: add WEIGHT * (DIR - base); may be repeated, and WEIGHT negative."""
    alpha: list[float] = Field(default=[])
    """What is added is multiplied by each: a model in OUT/alpha-A; unset: by 1, in OUT itself."""
    out: Path
    """Where the models go; whole or not at all."""
    method: str = ARITHMETIC
    """arithmetic, or one of mergekit's: ties, dare_ties, dare_linear, della, slerp, linear, ..."""
    density: float | None = Field(default=None, gt=0, le=1)
    """With a method of mergekit's: the part of each difference that is kept."""
    parameters: dict[str, Any] = Field(default={})
    """With a method of mergekit's: further parameters, such as {"normalize": true}."""
    allow_config_differences: bool = False
    """Merge models whose configs differ; the base's is kept."""
    allow_tokenizer_differences: bool = False
    """Merge models whose tokenizers differ; the base's is kept."""
    allow_missing_tensors: bool = False
    """What a model lacks is left as the base has it; what only it has is left out."""
    allow_not_finite: bool = False
    """Write infinities and NaNs, too."""
    overwrite: bool = False
    """Replace merged models that are there."""


COMMAND = CommandSpec(
    "merge", SUMMARY, MergeSettings, usage="--base DIR --sft DIR --rl DIR --alpha 0.5,1.0 --out DIR"
)
