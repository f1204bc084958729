"""`envserver rescore`: prints the result of rescoring; the work is in `running.rescoring`."""

from __future__ import annotations

from pathlib import Path

from envserver_records.errors import InputError, UsageError
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from ..running.mix import RunSpec
from ..running.rescoring import LEFT_OUT, Tally, rescore
from ..running.run_settings import RescoreSettings
from ..running.tally import counted
from .command_line import read_run_spec
from .console import Console
from .logs import show_logs
from .loop import run_loop
from .specs.rescore_command import COMMAND


def run(argv: list[str]) -> int:
    line = read_run_spec(COMMAND, argv)
    settings = line.settings
    if not settings.source:
        raise UsageError("`envserver rescore` needs a source.", hint="Give a file of `process`.")
    show_logs(settings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    bad: list[InputError] = []
    try:
        tally = _rescored(line, console, bad)
    except KeyboardInterrupt:
        console.print(f"Stopped: use --resume to continue {settings.out}.", markup=False)
        raise
    _show(console, tally, bad, settings.out)
    return 0 if tally.groups and not tally.left_out["failed"] else 1


def _rescored(line: RunSpec[RescoreSettings], console: Console, bad: list[InputError]) -> Tally:
    settings = line.settings
    with _line_of(console) as bar:
        shown = bar.add_task("", facts="")

        def tell(tally: Tally) -> None:
            bar.update(shown, facts=_so_far(tally))

        return run_loop(
            rescore(
                settings.source,
                line.reference,
                settings.env.model_dump(mode="json"),
                settings.out,
                rubric=settings.rubric,
                resume=settings.resume,
                overwrite=settings.overwrite,
                processes=settings.processes,
                sandbox=settings.sandbox,
                judge=settings.judge,
                without_messages=settings.without_messages,
                on_bad=bad.append if settings.skip_bad else None,
                on_progress=tell,
            )
        )


def _line_of(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.fields[facts]}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _so_far(tally: Tally) -> str:
    left_out = tally.left_out.total()
    return f"{counted(tally.groups, 'group')}, {tally.changed} changed, {left_out} left out"


def _show(console: Console, tally: Tally, bad: list[InputError], out: Path) -> None:
    table = Table(box=None, padding=(0, 2, 0, 1))
    for name in ("", "old", "new", "change"):
        table.add_column(name, justify="left" if not name else "right")
    if count := tally.compared:
        old, new = tally.old / count, tally.new / count
        table.add_row("mean reward", f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}")
    for one in tally.examples:
        name = f"{one.rollout_id} ({one.task_id})"
        table.add_row(name, f"{one.old:g}", f"{one.new:g}", f"{one.new - one.old:+.4g}")
    console.print(table)
    lines = [
        f"{counted(tally.groups, 'group')} with {counted(tally.rollouts, 'rollout')}"
        + (f", {tally.already} of them from an earlier run" if tally.already else "")
        + f": {tally.changed} of {tally.compared} rewards changed ({tally.up} up, "
        f"{tally.down} down)."
    ]
    if tally.unscorable:
        lines.append(f"Left out, without a reward: {counted(tally.unscorable, 'rollout')}.")
    for reason, number in tally.left_out.items():
        lines.append(f"Left out: {number} {LEFT_OUT[reason]}. First: {tally.first[reason]}")
    if bad:
        lines.append(f"Skipped: {counted(len(bad), 'bad line')}. First: {bad[0]}")
    if tally.judge:
        lines.append(tally.judge)
    lines.append(f"Groups in {out}" if tally.groups else "No group was written.")
    for text in lines:
        console.print(text, markup=False)
