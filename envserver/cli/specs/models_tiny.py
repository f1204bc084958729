"""The settings of `envserver models tiny`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Makes a language model of a million parameters that answers sums and differences up to
9, now and then right, alone or with tools: it starts where reinforcement learning can be seen to
work on a laptop. The same settings give the same weights on one machine."""


class TinySettings(Section):
    """The settings that `models tiny` has."""

    folder: Path = Path()
    """Where the model goes; may also stand first, without its name."""
    seed: int = 0
    """Of the experts, the first weights and the order of training."""
    steps: int = Field(default=500, ge=2)
    """Of the optimizer; fewer make a model that knows less."""
    groups: int = Field(default=124, ge=1)
    """Groups of eight expert rollouts in each of the two kinds of tasks."""
    solve_probability: float = Field(default=0.25, gt=0, le=1)
    """Share of the rollouts that the expert does right, and about that of the model in the end."""
    threads: int = Field(default=1, ge=1)
    """Of torch; another number gives other weights, and more help only where nothing else runs."""
    overwrite: bool = False
    """Replace a tiny model that is there."""


COMMAND = CommandSpec("models tiny", SUMMARY, TinySettings, usage="FOLDER", arguments=("folder",))
