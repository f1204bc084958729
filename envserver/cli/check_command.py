"""`envserver check`: prints the report of an environment check; the check itself is
`rollouts.checking`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import orjson
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..environment import Environment
from ..registry import absolute
from ..rollouts.checking import EnvironmentReport, Kind, check
from ..rollouts.checking import Progress as OnProgress
from ..rollouts.scoring import ScorerPool
from ..running.judging import judge_of, scorer_processes
from ..running.sandboxes import sandboxes_of
from ..running.spec import RunSpec
from ..running.tally import counted
from ..sandbox.watched import WatchedSandboxes
from .command_line import read_run_spec
from .console import Console
from .logs import configure_logs
from .loop import run_loop
from .specs.check_command import COMMAND, CheckSettings

_WRONG_SHOWN = 5


def run(argv: list[str]) -> int:
    """Runs the command.

    Raises:
        UsageError: a setting is wrong, there is no such environment, or it has no tasks.
    """
    line = read_run_spec(COMMAND, argv)
    configure_logs(line.settings.log_level, line.settings.log_format)
    with _bar(Console(stderr=True)) as bar:
        shown = bar.add_task("results", total=None)
        report = run_loop(
            check_environment(line, lambda done, of: bar.update(shown, completed=done, total=of))
        )
    if line.settings.as_json:
        facts = {**msgspec.to_builtins(report), "ok": report.ok}
        sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _show(Console(), report)
    return 0 if report.ok else 1


async def check_environment(
    line: RunSpec[CheckSettings], progress: OnProgress
) -> EnvironmentReport:
    """Checks the environment given on the command line and returns the report.

    Raises:
        ConfigError: it cannot be loaded, has no tasks, or needs a sandbox and no backend works.
    """
    settings = line.settings
    config = settings.env.model_dump(mode="json")
    async with (
        sandboxes_of(line.make_environment(), settings.sandbox) as service,
        judge_of(settings.judge, Path("data")) as judge,
    ):
        address = service.address if service is not None else None

        def fresh() -> Environment:
            environment = line.make_environment()
            if address is not None:
                environment.sandboxes = WatchedSandboxes(address)
            return environment

        async with ScorerPool(
            absolute(line.reference),
            config,
            scorer_processes(settings.processes, settings.judge),
            sandbox_address=address,
            judge=judge,
        ) as scorer:
            return await check(fresh, scorer, most_tasks=settings.tasks, progress=progress)


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _show(console: Console, report: EnvironmentReport) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("result", "scored", "least", "most", "expected", "verdict"):
        table.add_column(name, justify="right" if name in ("scored", "least", "most") else "left")
    for kind in report.kinds:
        verdict = f"WRONG: {len(kind.wrong)}" if kind.wrong else "ok"
        verdict += f" ({kind.raised} raise)" if kind.raised else ""
        table.add_row(
            kind.name, str(kind.count), _number(kind.least), _number(kind.most),
            _expected(kind), verdict,
        )  # fmt: skip
    console.print(table)
    for kind in report.kinds:
        for wrong in kind.wrong[:_WRONG_SHOWN]:
            got = wrong.error or f"reward {wrong.reward:g}"
            say(f"{kind.name}, task {wrong.task_id}: {got}; expected {_expected(kind)}")
        if len(kind.wrong) > _WRONG_SHOWN:
            say(f"{kind.name}: {len(kind.wrong) - _WRONG_SHOWN} more")
    for problem in report.problems:
        say(problem)
    all_of = "all" if report.whole else "the first"
    say(f"{report.environment}, {report.split}: {all_of} {counted(report.tasks, 'task')}.")
    if report.without_gold:
        say(f"No correct result is known for {counted(len(report.without_gold), 'task')}.")
    say("All checks passed." if report.ok else "Checks FAILED: see above.")


def _expected(kind: Kind) -> str:
    if kind.expected_least == kind.expected_most:
        return f"{kind.expected_least:g}"
    return f"{kind.expected_least:g} to {kind.expected_most:g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
