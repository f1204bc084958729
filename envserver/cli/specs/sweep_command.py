"""The settings of `envserver sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...running.run_settings import EvaluateSettings
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Merges base + alpha * (tuned - start) for each alpha, evaluates each model, and draws
its reward over alpha. Each model is served by an engine that this command starts
(--engine.backend vllm, local or auto), and evaluated as by `envserver evaluate`, with the same
settings. Into --out go the models, the evaluations, sweep.json and sweep.svg; results are written
into each model's card. The same command continues after an interruption."""


class SweepSettings(EvaluateSettings):
    """Settings of `sweep`, and those of `evaluate`."""

    base: Path
    """Folder of the base model: the one with alpha 0."""
    tuned: Path
    """Folder of the fine-tuned model or LoRA adapter."""
    start: Path | None = None
    """Folder of the model or adapter that `tuned` was trained from; unset: the base."""
    alpha: list[float] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1)
    """Factors of the difference, such as 0,0.25,0.5."""
    keep: Literal["all", "best"] = "all"
    """Which merged models stay on disk: all, or the one with the highest reward so far."""


COMMAND = CommandSpec(
    "sweep",
    SUMMARY,
    SweepSettings,
    usage="--base DIR --tuned DIR --alpha 0,0.5,1 --env NAME --out DIR",
    frequent=(
        *("base", "tuned", "start", "alpha", "keep"),
        *(name for name in FREQUENT if name != "model" and not name.startswith("openai.")),
        *("out", "overwrite", "pass_at", "engine.backend"),
    ),
    aliases={"ray": "ray.address"},
)
