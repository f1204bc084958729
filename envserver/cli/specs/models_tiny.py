"""The settings of `envserver models tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

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
    tasks: Literal["sums", "many", "half_sort", "half_tool"] = "sums"
    """sums: up to 9, 155 problems. many: tens of thousands, to show that what is learned
    generalises: sorting five digits with one answer, sums up to 99 with a calculator.
    half_sort, half_tool: one of these two, from right answers only, ended early."""
    seed: int = 0
    """Seed for the experts, the initial weights and the training order."""
    steps: int | None = Field(default=None, ge=2)
    """Optimizer steps; fewer give a weaker model. Default: 500 (sums), 600 (many), 38 (half_sort),
    190 (half_tool)."""
    groups: int | None = Field(default=None, ge=1)
    """Groups of expert rollouts for each kind of tasks. Default: 124 groups of eight (sums), 1500
    of two (many), of one (half_sort, half_tool)."""
    solve_probability: float | None = Field(default=None, gt=0, le=1)
    """Fraction of rollouts that the expert solves, and about what the trained model solves.
    Default: 0.25 (sums), 0.35 (many), 1 (half_sort, half_tool)."""
    threads: int = Field(default=1, ge=1)
    """Torch threads; another number gives other weights, and more help only on an idle machine."""
    overwrite: bool = False
    """Replace an existing tiny model."""


COMMAND = CommandSpec("models tiny", SUMMARY, TinySettings, usage="FOLDER", arguments=("folder",))
