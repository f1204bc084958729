"""`envserver check`: prints the report of a check; the work is in `running.checking`."""

from __future__ import annotations

import sys

import msgspec
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..rollouts.check_report import EnvironmentReport
from ..running.checking import check_environment
from ..running.tally import counted
from .check_card import card, cost_of, ended_by, expected, number, page, sections, verdict
from .command_line import read_run_spec
from .console import Console, show_json
from .logs import show_logs
from .loop import run_loop
from .specs.check_command import COMMAND


def run(argv: list[str]) -> int:
    line = read_run_spec(COMMAND, argv)
    show_logs(line.settings)
    with _bar(Console(stderr=True)) as bar:
        shown = {name: bar.add_task(name, total=None) for name in ("plays", "results")}
        report = run_loop(
            check_environment(
                line,
                lambda name, done, of: bar.update(shown[name], completed=done, total=of),
            )
        )
    if line.settings.as_json:
        show_json({**msgspec.to_builtins(report, str_keys=True), "ok": report.ok})
    elif line.settings.card or line.settings.markdown:
        sys.stdout.write(page(report) if line.settings.markdown else card(report))
    else:
        _show(Console(), report)
    return 0 if report.ok else 1


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _show(console: Console, report: EnvironmentReport) -> None:
    console.print(_results(report))
    if report.plays:
        console.print(_plays(report))
    for title, lines in sections(report).items():
        console.say("\n".join([f"{title}:", *(f"  {line}" for line in lines), ""]))
    for problem in report.problems:
        console.say(problem)
    if report.scoring is not None:
        limit = report.scoring.limit_cpu_seconds
        console.say(f"A score takes {cost_of(report.scoring)} (limit {limit:g} s).")
    all_of = "all" if report.whole else "the first"
    console.say(f"{report.environment}, {report.split}: {all_of} {counted(report.tasks, 'task')}.")
    if report.without_gold:
        console.say(f"No correct result is known for {counted(len(report.without_gold), 'task')}.")
    console.say("All checks passed." if report.ok else "Checks FAILED: see above.")


def _results(report: EnvironmentReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("result", "scored", "least", "most", "expected", "verdict"):
        table.add_column(name, justify="right" if name in ("scored", "least", "most") else "left")
    for kind in report.kinds:
        table.add_row(
            kind.name, str(kind.count), number(kind.least), number(kind.most),
            expected(kind), verdict(kind),
        )  # fmt: skip
    return table


def _plays(report: EnvironmentReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("played", "plays", "solved", "least", "mean", "most", "turns", "ended by"):
        left = name in ("played", "ended by")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "played")
    for one in report.plays:
        scored = len(one.rewards)
        table.add_row(
            one.way, str(scored), str(one.solved), number(min(one.rewards, default=None)),
            number(one.mean), number(max(one.rewards, default=None)),
            f"{one.turns / scored:.1f}" if scored else "-", ended_by(one),
        )  # fmt: skip
    return table
