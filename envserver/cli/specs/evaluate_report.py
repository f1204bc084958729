"""The settings of `envserver evaluate report`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Section
from ...evaluation_config import Failures, Truncated
from ...running.run_settings import PricesConfig
from ..command_line import CommandSpec

SUMMARY = """Makes the report of an evaluation anew (report.json, report.md, report.html), from the
groups in its folder and without a model: it is the same byte for byte, or counts the same attempts
otherwise where a setting says so."""


class ReportSettings(Section):
    """The settings that `evaluate report` has."""

    folder: Path
    """Of the evaluation; may be the first word."""
    pass_at: float | None = Field(default=None, gt=0, le=1)
    """Least reward of an attempt that passes; unset: as it was. Also the others."""
    failures: Failures | None = None
    """Attempts that were lost by our fault are left out (drop), or count as 0 (zero)."""
    truncated: Truncated | None = None
    """Attempts in which the model was cut off count what they scored (score), 0 (zero), or are left
    out (drop)."""
    prices: PricesConfig = PricesConfig()
    models_file: Path = Path("configs/models.yaml")
    """Where models may have prices."""


COMMAND = CommandSpec(
    "evaluate report", SUMMARY, ReportSettings, usage="FOLDER", arguments=("folder",)
)
