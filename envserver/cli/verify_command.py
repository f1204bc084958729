"""`envserver verify`: prints the result of the check; the work is in `running.verifying`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.table import Table

from ..rollouts.audit import NOT_COMPARED
from ..running.tally import counted
from ..running.verifying import Progress as OnProgress
from ..running.verifying import Report, verify_source
from .console import Console, show_json
from .logs import show_logs
from .loop import run_loop
from .reading_bar import facts_bar
from .specs.verify_command import COMMAND

_FINDINGS_SHOWN = 20
_WORST_SHOWN = 5
_VERDICTS = {
    "exact": "OK: every logprob equals the engine's exactly.",
    "within_tolerance": "OK: every logprob is within the tolerance.",
    "wrong": "DIFFERENT: see the findings below.",
    "nothing_compared": "NOTHING was compared.",
}


def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    show_logs(settings)
    with _bar(Console(stderr=True)) as on_progress:
        report, model = run_loop(verify_source(settings, on_progress))
    if settings.as_json:
        show_json({"source": settings.source, "model": model, **report.facts()})
    else:
        _show(Console(), report, f"{settings.source} against {model}")
    return 0 if report.verdict in ("exact", "within_tolerance") else 1


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[OnProgress]:
    with facts_bar(console, 1.0) as update:

        def on_progress(groups: int, rows: int, share: float | None) -> None:
            facts = f"{counted(groups, 'group')} read, {counted(rows, 'row')} compared"
            update(completed=share, facts=facts)

        yield on_progress


def _show(console: Console, report: Report, title: str) -> None:
    for part in (title, _VERDICTS[report.verdict]):
        console.say(part)
    console.print(_sums(report))
    if report.worst:
        console.print("Largest differences of logprobs:", highlight=False)
        console.print(_worst(report))
    for finding in report.findings[:_FINDINGS_SHOWN]:
        text = f"{finding.kind}: {finding.place}: {finding.message}"
        console.say(text)
    if (more := report.kinds.total() - _FINDINGS_SHOWN) > 0:
        console.print(f"... and {counted(more, 'finding')} more.", highlight=False)


def _sums(report: Report) -> Table:
    totals = report.totals.facts()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    count = totals["tokens"]
    table.add_row("groups", f"{report.groups:,}", "")
    if report.unsealed:
        words = "written by an older version or another program: changes are not found"
        table.add_row("  without digest", f"{report.unsealed:,}", words)
    table.add_row("rows", f"{report.rows:,}", "each checked separately")
    for reason, number in report.not_compared.most_common():
        tokens = counted(report.tokens_not_compared[reason], "trained token")
        words = f"{NOT_COMPARED[reason]} ({tokens})"
        table.add_row("  not compared", f"{number:,}", words)
    table.add_row("  compared", f"{totals['rows']:,}", _version(report.version))
    table.add_row("trained tokens", f"{count:,}", "in the compared rows")
    if count:
        exact, over = totals["tokens_exactly_equal"], totals["tokens_over_tolerance"]
        table.add_row("  exactly equal", f"{exact:,}", _percent(exact, count))
        words = f"{_percent(over, count)}, in {counted(totals['rows_over_tolerance'], 'row')}"
        table.add_row(f"  off by over {totals['tolerance']:g}", f"{over:,}", words)
        largest, mean = totals["largest_difference"], totals["mean_difference"]
        table.add_row("largest difference", f"{largest:.3g}", f"mean {mean:.3g}")
        kl = f"k1 {totals['kl_k1']:.3g}, k3 {totals['kl_k3']:.3g}"
        table.add_row("KL estimates", "", f"{kl} (recorded policy to engine, per token)")
    for kind, number in report.kinds.most_common():
        table.add_row(f"[red]{kind}[/]", f"{number:,}", "")
    return table


def _version(version: int) -> str:
    return "" if version < 0 else f"policy version {version}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g} %"


def _worst(report: Report) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 1))
    table.add_column("line", justify="right")
    table.add_column("rollout", overflow="fold")
    for name in ("row", "place", "token", "recorded", "now", "off by"):
        table.add_column(name, justify="right", no_wrap=True)
    for worst in report.worst[:_WORST_SHOWN]:
        table.add_row(
            "-" if worst.line is None else str(worst.line),
            worst.rollout_id or worst.group_id,
            *(str(number) for number in (worst.row, worst.position, worst.token)),
            f"{worst.recorded:.5f}",
            f"{worst.again:.5f}",
            f"{worst.difference:+.2g}",
        )
    return table
