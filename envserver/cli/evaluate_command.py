"""`envserver evaluate`: prints an evaluation; the work is in `running.evaluating`.

Its subcommands: `evaluate compare A B` compares two evaluations, `evaluate merge` makes one of
several shards, `evaluate report DIR` writes a report again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..config import MixSettings
from ..evaluation.report import Report
from ..evaluation.suite import Suite
from ..evaluation.tables import TextTable, notes_of, summary_of, tables_of, warnings_of
from ..running.evaluating import EvaluationView, evaluate_members
from ..running.group_run import GroupRun, Show
from ..running.python_api import EVALUATION_DEFAULTS, choice_of
from .console import Console
from .evaluate_members import read_members
from .logs import show_logs
from .loop import run_loop
from .process import show_result
from .progress import ProgressView
from .signals import SignalStop
from .specs.evaluate_command import COMMAND

_SHOWN_OF_SEVERAL = ("Outcomes", "Tokens, time and cost")


def run(argv: list[str]) -> int:
    """Runs the command; returns 0 if anything was evaluated, 130 if it was stopped early."""
    members = read_members(COMMAND, argv, defaults=EVALUATION_DEFAULTS)
    settings = members[0].settings
    show_logs(settings)
    for member in members:
        own: Any = member.settings
        if own.sampling.temperature == 0 and "group_size" not in own.env.model_fields_set:
            own.env.group_size = 1
    console = Console(stderr=True)
    stop = SignalStop(console.print)
    work = evaluate_members(members, choice_of(settings), view=_Shown(console), stop=stop)
    done = run_loop(work)
    return 130 if done.stopped else 0


class Progress(EvaluationView):
    """Shows the progress of an evaluation, and not its report."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.show = shown(console)

    def say(self, line: str) -> None:
        self._console.say(line)


class _Shown(Progress):
    """Shows an evaluation on a terminal."""

    def ended(self, run: GroupRun, settings: MixSettings) -> None:
        show_result(self._console, run, settings)

    def report(self, report: Report | Suite, folder: Path) -> None:
        show_report(self._console, report, folder)


def shown(console: Console) -> Show:
    """Returns what shows the run of an environment on a terminal."""
    return partial(ProgressView, console)


def show_report(console: Console, report: Report | Suite, folder: Path) -> None:
    """Prints the tables of a report, how to read them, and where the files are."""
    if isinstance(report, Suite):
        tables = [summary_of(report)]
        for part in report.parts:
            shown = [one for one in tables_of(part) if one.title in _SHOWN_OF_SEVERAL]
            tables += [
                TextTable(f"{part.name}: {one.title}", one.header, one.rows) for one in shown
            ]
        notes = warnings_of(report)
    else:
        tables, notes = tables_of(report), notes_of(report)
    show_tables(console, tables, notes)
    told = f"Report in {folder / 'report.html'}, report.md and report.json"
    console.say(told)


def show_tables(console: Console, tables: list[TextTable], notes: list[str]) -> None:
    """Prints tables with notes below them."""
    for text in tables:
        table = Table(title=text.title, title_justify="left")
        for number, name in enumerate(text.header):
            table.add_column(Text(name), justify="right" if number else "left", overflow="fold")
        for row in text.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for note in notes:
        console.say(note)
