"""`envserver score`: prints a summary of the scores; the work is in `running.scoring`."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..running.scoring import Summary, run_score
from .command_line import read_run_spec
from .console import Console
from .logs import show_logs
from .loop import run_loop
from .specs.score_command import COMMAND


def run(argv: list[str]) -> int:
    """Runs the command; returns 1 if rows have an error."""
    line = read_run_spec(COMMAND, argv)
    settings = line.settings
    show_logs(settings)
    console = Console(stderr=True)
    try:
        with _bar(console) as bar:
            shown = bar.add_task("", total=1.0, rows=0)
            scoring = run_score(
                line.reference,
                settings.env.model_dump(mode="json"),
                settings.input,
                settings.out,
                processes=settings.processes,
                sandbox=settings.sandbox,
                judge=settings.judge,
                progress=lambda rows, share: bar.update(shown, completed=share, rows=rows),
            )
            summary = run_loop(scoring)
    except KeyboardInterrupt:
        console.print(f"Stopped: {settings.out} was not changed.", highlight=False, markup=False)
        raise
    _show(console, summary, settings.out)
    return 1 if summary.errors else 0


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.fields[rows]} rows"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _show(console: Console, summary: Summary, output: Path) -> None:
    mean = "none" if summary.mean_reward is None else f"{summary.mean_reward:.3f}"
    lines = [
        f"{summary.rows} rows in {summary.seconds:.1f} s: {summary.scored} scored, "
        f"{summary.unscorable} not scorable, {summary.errors} errors; mean reward {mean}"
    ]
    if summary.first_error:
        lines.append(f"First error: {summary.first_error}")
    if summary.judge:
        lines.append(summary.judge)
    lines.append(f"Scores in {output}")
    for text in lines:
        console.say(text)
