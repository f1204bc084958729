"""`envserver evaluate`: its settings and what it shows; the work is done in `evaluate.py`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import Settings
from ..evaluation.report import Failures, Report
from ..evaluation.tables import notes_of, tables_of
from .command_line import read_command_line
from .evaluate import Choice, evaluate
from .logs import configure_logs
from .loop import run_loop

SUMMARY = """Measures a model on an environment's tasks: mean reward, pass@k and pass^k with
intervals, overall and by kind of task, beside the environment's baselines. Tasks are of the split
`test` unless another is given, `--env.total_steps` of them or all, each once; `--env.group_size`
attempts each (unset: 1 where sampling.temperature is 0). No group is filtered. Groups, report.json
and report.md are written to --out."""

DEFAULTS = {"env": {"split": "test"}, "rollouts": {"min_group_size": 1}}


class EvaluateSettings(Settings):
    """Settings with the flags that only `evaluate` has."""

    out: Path | None = None
    """Folder for groups and report; unset: runs/evaluate/<environment>-<time>."""
    resume: bool = False
    """Go on in a folder that exists (--out): its groups are not made again, the report is."""
    overwrite: bool = False
    """Replace what a folder holds."""
    pass_at: float = Field(default=1.0, gt=0, le=1)
    """Least reward of an attempt that passes."""
    failures: Failures = "drop"
    """Attempts that were lost by our fault are left out (drop), or count as 0 (zero)."""
    no_baselines: bool = False
    """Do not run the environment's baselines."""


def run(argv: list[str]) -> int:
    """The command: 0 where anything could be evaluated, 130 when it was stopped before its end.

    Raises:
        EnvserverError: it cannot be run, nothing could be evaluated, or it ended by failures (then
            there is a report of what was done before).
    """
    line = read_command_line(
        "evaluate", SUMMARY, argv, settings_class=EvaluateSettings, defaults=DEFAULTS
    )
    if line is None:
        return 0
    settings = line.settings
    configure_logs(settings.log_level)
    if settings.sampling.temperature == 0 and "group_size" not in settings.env.model_fields_set:
        settings.env.group_size = 1
    choice = Choice(
        folder=settings.out,
        resume=settings.resume,
        overwrite=settings.overwrite,
        pass_at=settings.pass_at,
        failures=settings.failures,
        baselines=not settings.no_baselines,
    )
    environment = line.make_environment()
    console = Console(stderr=True)
    return run_loop(evaluate(line.reference, environment, settings, choice, console, show_report))


def show_report(console: Console, report: Report, folder: Path) -> None:
    """The tables of a report, how they are to be read, where they lie."""
    for text in tables_of(report):
        table = Table(title=text.title, title_justify="left")
        for number, name in enumerate(text.header):
            table.add_column(Text(name), justify="right" if number else "left", overflow="fold")
        for row in text.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for note in notes_of(report):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    told = f"Report in {folder / 'report.md'} and report.json"
    console.print(told, highlight=False, markup=False, soft_wrap=True)
