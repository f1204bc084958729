"""The settings of `envserver models tiny`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Trains a language model of a million parameters that answers sums and differences up
to 9 and is sometimes right, with or without tools: a starting point from which reinforcement
learning visibly works on a laptop. The same settings give the same weights on one machine."""


class TinySettings(Section):
    """Settings of `models tiny`."""

    folder: Path = Path()
    """Folder for the model. Can be given as the first argument."""
    seed: int = 0
    """Seed for the experts, the initial weights and the training order."""
    steps: int = Field(default=500, ge=2)
    """Optimizer steps; fewer give a weaker model."""
    groups: int = Field(default=124, ge=1)
    """Groups of eight expert rollouts for each of the two kinds of tasks."""
    solve_probability: float = Field(default=0.25, gt=0, le=1)
    """Fraction of rollouts that the expert solves, and about what the trained model solves."""
    threads: int = Field(default=1, ge=1)
    """Torch threads; another number gives other weights, and more help only on an idle machine."""
    overwrite: bool = False
    """Replace an existing tiny model."""


COMMAND = CommandSpec("models tiny", SUMMARY, TinySettings, usage="FOLDER", arguments=("folder",))
