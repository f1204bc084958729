"""The settings of `envserver evaluate compare`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Section
from ...evaluation_config import Failures, Truncated
from ..command_line import CommandSpec

SUMMARY = """Compares two evaluations: folders of `evaluate` or `lm-eval`, or JSONL files of
`process`. Tasks are paired by environment and id; told are the difference of B less A with its
interval, an exact paired test, and the tasks that differ most. What only one of them has is named
and left out. Both are counted by the same rules, from their groups."""


class CompareSettings(Section):
    """The settings that `evaluate compare` has."""

    a: Path
    """The run to compare with (the old one); may be the first word."""
    b: Path
    """The run to be compared (the new one); may be the second word."""
    out: Path | None = None
    """Folder for comparison.json, comparison.md and comparison.html; unset: none is written."""
    pass_at: float | None = Field(default=None, gt=0, le=1)
    """Least reward of an attempt that passes; unset: as A was counted. Also the next two."""
    failures: Failures | None = None
    """Attempts that were lost by our fault are left out (drop), or count as 0 (zero)."""
    truncated: Truncated | None = None
    """Attempts in which the model was cut off count what they scored (score), 0 (zero), or are left
    out (drop)."""
    seed: int = Field(default=0, ge=0)
    """Of intervals, and of random signs where an exact test would take too long."""
    as_json: bool = False
    """Print the comparison as one JSON object."""


COMMAND = CommandSpec(
    "evaluate compare", SUMMARY, CompareSettings, usage="A B", arguments=("a", "b")
)
