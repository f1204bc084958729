"""`envserver publish`: shows what is published, and publishes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..evaluation.folders import View, read_folder
from ..evaluation.report import Report
from ..evaluation.tables import TextTable
from .console import Console
from .evaluate_command import show_tables
from .specs.publish_command import COMMAND

if TYPE_CHECKING:
    from envserver_factory.publishing.models import Plan, Result


def run(argv: list[str]) -> int:
    """Runs the command; prints the address of the commit, or with `--dry_run` the card."""
    from envserver_factory.publishing.models import plan, publish

    settings = COMMAND.read(argv)
    planned = plan(
        settings.folder,
        settings.repository,
        results=[one for folder in settings.evaluation for one in results_in(folder)],
        base_model=settings.base_model,
        license=settings.license,
        private=not settings.public,
    )
    _show(Console(stderr=True), planned)
    if settings.dry_run:
        print(planned.card, end="")
    else:
        print(publish(planned))
    return 0


def results_in(folder: Path) -> list[Result]:
    """Returns the results of an evaluation's folder for a card."""
    return results_of(read_folder(folder, View()))


def results_of(reports: Iterable[Report]) -> list[Result]:
    """Returns the results of reports for a card; parts without a score are left out."""
    from envserver_factory.publishing.models import Result

    return [
        Result(
            environment=report.name or report.env,
            split=str(report.split),
            tasks=measured.tasks,
            attempts=measured.rollouts,
            mean_reward=measured.mean_reward.value,
            low=measured.mean_reward.low,
            high=measured.mean_reward.high,
            pass_at={k: one.value for k, one in measured.pass_at.items()},
        )
        for report in reports
        if (measured := report.run.overall) is not None
    ]


def _show(console: Console, planned: Plan) -> None:
    kind = "a private" if planned.private else "a public"
    files = [[one.name, f"{one.size:,}", one.sha256[:12]] for one in planned.files]
    tables = [
        TextTable(f"To {planned.repository}, {kind} model", ["file", "bytes", "sha256"], files)
    ]
    if planned.left_out:
        rows = [[name, reason] for name, reason in planned.left_out.items()]
        tables.append(TextTable("Not uploaded", ["file", "reason"], rows))
    show_tables(console, tables, [])
