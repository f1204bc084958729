"""How attempts count in a report, and `--evaluate.*` of `serve`. Small: settings import it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from envserver_records.tasks import Split
from pydantic import Field

from .described import Section

Failures = Literal["drop", "zero"]
"""Attempts lost by the server's or the engine's fault are left out, or count as 0."""
Truncated = Literal["score", "zero", "drop"]
"""Truncated attempts count their score, count as 0, or are left out."""


class HeldOutConfig(Section):
    """Evaluates a held-out split while trainers train; the words are those of `evaluate`."""

    every: int | None = Field(default=None, ge=1)
    """Evaluate the first published policy version, and then the first at or after each multiple of
    this number; unset: only when asked (POST /v1/evaluations)."""
    split: Split = "test"
    """Split of the tasks; not the one that is trained on."""
    total_steps: int = Field(default=100, ge=1)
    """Maximum number of tasks of each environment; each is tried once by a group."""
    group_size: int | None = Field(default=None, ge=1)
    """Attempts at each task; unset: as in training."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; unset: as in training."""
    max_concurrent: int = Field(default=16, ge=1)
    """Maximum rollouts of an evaluation in flight, beside those of training: its share of the
    engine."""
    hold_seconds: float = Field(default=0.0, ge=0)
    """Seconds that a trainer's pause for new weights may wait for the end of an evaluation, at most
    half of the pause's own `timeout_seconds`; 0: weights change during an evaluation, and its
    result says which versions sampled."""
    baselines: bool = False
    """Run the environments' baselines, too."""
    pass_at: float | None = Field(default=None, allow_inf_nan=False)
    """Minimum reward of an attempt that passes; unset: that of a solved task."""
    failures: Failures = "drop"
    """How to count attempts lost to infrastructure failures: leave them out, or as 0 (zero)."""
    truncated: Truncated = "score"
    """How to count attempts in which the model was cut off: by their score, as 0, or not at all."""
    out: Path | None = None
    """Folder of the evaluations, a folder each; unset: evaluations, beside the store."""
