"""`envserver evaluate report DIR`: the report of an evaluation made anew from its files."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from rich.console import Console

from ..config import Section
from ..evaluation.folders import View
from ..evaluation.report import Failures, Truncated
from ..running.evaluation_folder import write_report
from ..running.prices import PricesConfig, pricing_of
from .command_line import CommandSpec
from .evaluate_command import show_report

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


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        EnvserverError: there is no evaluation, or its files cannot be read.
    """
    settings = COMMAND.read(argv)
    if settings is None:
        return 0
    view = View(
        pass_at=settings.pass_at,
        failures=settings.failures,
        truncated=settings.truncated,
        pricing=pricing_of(settings.prices, None, settings.models_file),
    )
    report = write_report(settings.folder, view)
    show_report(Console(stderr=True), report, settings.folder)
    return 0
