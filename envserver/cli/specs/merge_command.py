"""The settings of `envserver merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Merges the weights of models: base + alpha * (rl - sft), or base + alpha * the sum
of weight * (model - base), for several alphas in one pass, with a few megabytes of memory. Other
methods (ties, dare_ties, slerp, ...) use mergekit if it is installed."""


ARITHMETIC = "arithmetic"


class MergeSettings(Section):
    """Settings of `merge`."""

    base: Path
    """Folder of the base model; its config, tokenizer and dtypes are kept."""
    rl: Path | None = None
    """Folder of the model after reinforcement learning: a model or a LoRA adapter."""
    sft: Path | None = None
    """Folder of the model before reinforcement learning: a model or a LoRA adapter."""
    add: list[str] = Field(default=[])
    """DIR=WEIGHT: add WEIGHT * (DIR - base); FILE=WEIGHT: add WEIGHT * a vector of --save_vector.
    May be repeated; WEIGHT may be negative."""
    alpha: list[float] = Field(default=[])
    """Factors of the added difference: one model in OUT/alpha-A for each; unset: factor 1, in
    OUT itself."""
    out: Path | None = None
    """Output folder, written atomically."""
    save_vector: Path | None = None
    """File for what is added to the base, before alpha: a safetensors file that --add takes. With
    this, --out may be missing."""
    method: str = ARITHMETIC
    """arithmetic, or a mergekit method: ties, dare_ties, dare_linear, della, slerp, linear, ..."""
    density: float | None = Field(default=None, gt=0, le=1)
    """With a mergekit method: fraction of each difference that is kept."""
    parameters: dict[str, Any] = Field(default={})
    """With a mergekit method: additional parameters, such as {"normalize": true}."""
    allow_config_differences: bool = False
    """Merge models with different configs; the base's config is kept."""
    allow_tokenizer_differences: bool = False
    """Merge models with different tokenizers; the base's tokenizer is kept."""
    allow_missing_tensors: bool = False
    """Keep the base's tensors that a model lacks, and ignore tensors that the base lacks."""
    allow_not_finite: bool = False
    """Allow infinities and NaNs in the output."""
    overwrite: bool = False
    """Replace existing merged models."""


COMMAND = CommandSpec(
    "merge", SUMMARY, MergeSettings, usage="--base DIR --sft DIR --rl DIR --alpha 0.5,1.0 --out DIR"
)
