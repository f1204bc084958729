"""The settings of `envserver evaluate report`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Section
from ...evaluation_config import Failures, Truncated
from ...prices_config import PricesConfig
from ..command_line import CommandSpec

SUMMARY = """Writes the report of an evaluation again (report.json, report.md, report.html), from
the groups in its folder and without a model. The report is the same byte for byte unless a
setting changes how attempts are counted."""


class ReportSettings(Section):
    """Settings of `evaluate report`."""

    folder: Path
    """Folder of the evaluation. Can be given as the first argument."""
    pass_at: float | None = Field(default=None, allow_inf_nan=False)
    """Minimum reward of an attempt that passes; unset: as in the evaluation. The same holds for
    `failures` and `truncated`."""
    failures: Failures | None = None
    """Whether attempts lost to infrastructure failures are left out (drop) or count as 0 (zero)."""
    truncated: Truncated | None = None
    """Whether truncated attempts count with their score (score), as 0 (zero), or are left out
    (drop)."""
    prices: PricesConfig = PricesConfig()
    models_file: Path = Path("configs/models.yaml")
    """YAML file that may contain prices of models."""


COMMAND = CommandSpec(
    "evaluate report", SUMMARY, ReportSettings, usage="FOLDER", arguments=("folder",)
)
