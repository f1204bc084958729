"""`envserver evaluate report DIR`: writes the report of an evaluation again from its files."""

from __future__ import annotations

from ..evaluation.folders import View
from ..running.evaluation_folder import write_report
from ..running.prices import pricing_of
from .console import Console
from .evaluate_command import show_report
from .specs.evaluate_report import COMMAND


def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    view = View(
        pass_at=settings.pass_at,
        failures=settings.failures,
        truncated=settings.truncated,
        pricing=pricing_of(settings.prices, None, settings.models_file),
    )
    report = write_report(settings.folder, view)
    show_report(Console(stderr=True), report, settings.folder)
    return 0
