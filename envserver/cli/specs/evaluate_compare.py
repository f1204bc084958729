"""The settings of `envserver evaluate compare`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Section
from ...evaluation_config import Failures, Truncated
from ..command_line import CommandSpec

SUMMARY = """Compares two evaluations: folders of `evaluate` or `lm-eval`, or JSONL files of
`process`. Tasks are paired by environment and id. The output has the difference B - A with its
interval, an exact paired test, and the tasks that differ most. Tasks that only one of them has
are listed and left out. Both are counted by the same rules, from their groups."""


class CompareSettings(Section):
    """Settings of `evaluate compare`."""

    a: Path
    """The baseline run (the old one). Can be given as the first argument."""
    b: Path
    """The run to compare with the baseline (the new one). Can be given as the second argument."""
    out: Path | None = None
    """Folder for comparison.json, comparison.md and comparison.html; unset: no files are
    written."""
    pass_at: float | None = Field(default=None, allow_inf_nan=False)
    """Minimum reward of an attempt that passes; unset: as in A. The same holds for `failures`
    and `truncated`."""
    failures: Failures | None = None
    """Whether attempts lost to infrastructure failures are left out (drop) or count as 0 (zero)."""
    truncated: Truncated | None = None
    """Whether truncated attempts count with their score (score), as 0 (zero), or are left out
    (drop)."""
    seed: int = Field(default=0, ge=0)
    """Seed for the intervals, and for random signs if an exact test would take too long."""
    as_json: bool = False
    """Print the comparison as one JSON object."""


COMMAND = CommandSpec(
    "evaluate compare", SUMMARY, CompareSettings, usage="A B", arguments=("a", "b")
)
