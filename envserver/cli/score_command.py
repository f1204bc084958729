"""Commands that judge what was made: `score`, `rescore` and `verify`; each prints a summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from envserver_records.errors import InputError, UsageError

from ..running.run_settings import RescoreSettings, ScoreSettings, VerifySettings
from ..telemetry.redaction import counted
from . import lean_imports
from .command_line import ENGINE, CommandSpec, read_run_spec

if TYPE_CHECKING:
    from ..rollouts.audit import Difference
    from ..running.rescoring import Tally
    from ..running.scoring import Summary
    from ..running.verifying import Report
    from .console import Console


_SCORE = """Scores rows {"task": a row of a data set or a task id, "response": "text"} (or a row
with "messages") without a model: writes reward, components, metrics and error of each, in order.
Exit status 0: no row has an error; 1: at least one has; 2: the command line is wrong."""

SCORE = CommandSpec(
    "score",
    _SCORE,
    ScoreSettings,
    usage="--env NAME --input FILE --out FILE",
    frequent=("environment", "input", "out", "processes", "sandbox.backend", "log_level"),
)


def run_score(argv: list[str]) -> int:
    with lean_imports():
        from ..running import scoring
        from .console import Console, facts_bar
        from .loop import run_loop, show_logs

    line = read_run_spec(SCORE, argv)
    settings = line.settings
    show_logs(settings)
    console = Console(stderr=True)
    try:
        with facts_bar(console, 1.0) as update:
            work = scoring.run_score(
                line, lambda rows, share: update(completed=share, facts=f"{rows} rows")
            )
            summary = run_loop(work)
    except KeyboardInterrupt:
        console.say(f"Stopped: {settings.out} was not changed.")
        raise
    _show(console, summary, settings.out)
    return 1 if summary.errors else 0


def _show(console: Console, summary: Summary, output: Path) -> None:
    mean = "none" if summary.mean_reward is None else f"{summary.mean_reward:.3f}"
    console.say(
        f"{summary.rows} rows in {summary.seconds:.1f} s: {summary.scored} scored, "
        f"{summary.unscorable} not scorable, {summary.errors} errors; mean reward {mean}"
    )
    if summary.first_error:
        console.say(f"First error: {summary.first_error}")
    if summary.judge:
        console.say(summary.judge)
    console.say(f"Scores in {output}")


_RESCORE = """Scores stored rollouts again with the environment or another rubric; no policy
is called. `envserver rescore FILE... --env NAME --out FILE` writes the same lines with new scores,
the old scores as `rescored_from`, and prints how they differ. Rollouts whose scoring fails
through no fault of the model are left out and counted, never scored 0. Exit status 1: something
failed, or nothing was scored."""

RESCORE = CommandSpec(
    "rescore",
    _RESCORE,
    RescoreSettings,
    usage="FILE... --env NAME --out FILE",
    arguments=("source",),
    frequent=(
        *("source", "environment", "out", "rubric", "resume", "overwrite", "skip_bad"),
        *("without_messages", "processes", "sandbox.backend", "log_level"),
    ),
)


def run_rescore(argv: list[str]) -> int:
    with lean_imports():
        from ..running.rescoring import rescore
        from .console import Console, facts_bar
        from .loop import run_loop, show_logs

    line = read_run_spec(RESCORE, argv)
    settings = line.settings
    if not settings.source:
        raise UsageError("`envserver rescore` needs a source.", hint="Give a file of `process`.")
    show_logs(settings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    bad: list[InputError] = []
    try:
        with facts_bar(console, None) as update:

            def on_progress(tally: Tally) -> None:
                facts = f"{counted(tally.groups, 'group')}, {tally.changed} changed, "
                update(facts=f"{facts}{tally.left_out.total()} left out")

            on_bad = bad.append if settings.skip_bad else None
            tally = run_loop(rescore(line, on_bad=on_bad, on_progress=on_progress))
    except KeyboardInterrupt:
        console.say(f"Stopped: use --resume to continue {settings.out}.")
        raise
    _show_rescored(console, tally, bad, settings.out)
    return 0 if tally.groups and not tally.left_out["failed"] else 1


def _show_rescored(console: Console, tally: Tally, bad: list[InputError], out: Path) -> None:
    from ..running.rescoring import LEFT_OUT
    from .console import table

    rows = [
        (f"{example.rollout_id} ({example.task_id})", f"{example.old:g}", f"{example.new:g}",
         f"{example.new - example.old:+.4g}")
        for example in tally.examples
    ]  # fmt: skip
    if count := tally.compared:
        old, new = tally.old / count, tally.new / count
        rows.insert(0, ("mean reward", f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}"))
    header = ("", "old", "new", "change")
    console.print(table(header, rows, right=header[1:]))
    already = f", {tally.already} of them from an earlier run" if tally.already else ""
    console.say(
        f"{counted(tally.groups, 'group')} with {counted(tally.rollouts, 'rollout')}{already}: "
        f"{tally.changed} of {tally.compared} rewards changed ({tally.up} up, {tally.down} down)."
    )
    if tally.unscorable:
        console.say(f"Left out, without a reward: {counted(tally.unscorable, 'rollout')}.")
    for reason, number in tally.left_out.items():
        console.say(f"Left out: {number} {LEFT_OUT[reason]}. First: {tally.first[reason]}")
    if bad:
        console.say(f"Skipped: {counted(len(bad), 'bad line')}. First: {bad[0]}")
    if tally.judge:
        console.say(tally.judge)
    console.say(f"Groups in {out}" if tally.groups else "No group was written.")


_VERIFY = """Checks that delivered tokens are what the engine sampled: reads a JSONL file of
`process` or the groups of a running server (without leasing any), has the engine score the rows
again (prompt_logprobs), and compares ids, masks and logprobs. Exit status 0: everything is correct;
1: there are differences, or nothing could be compared; 2: the command line is wrong."""

VERIFY = CommandSpec(
    "verify",
    _VERIFY,
    VerifySettings,
    usage="FILE|ADDRESS",
    arguments=("source",),
    frequent=("source", *ENGINE, "tolerance", "policy_version", "sample", "concurrency", "as_json"),
)

_FINDINGS_SHOWN = 20
_WORST_SHOWN = 5
_VERDICTS = {
    "exact": "OK: every logprob equals the engine's exactly.",
    "within_tolerance": "OK: every logprob is within the tolerance.",
    "wrong": "DIFFERENT: see the findings below.",
    "nothing_compared": "NOTHING was compared.",
}


def run_verify(argv: list[str]) -> int:
    with lean_imports():
        from ..running.verifying import verify_source
        from .console import Console, facts_bar, show_json
        from .loop import run_loop, show_logs

    settings = VERIFY.read(argv)
    show_logs(settings)
    with facts_bar(Console(stderr=True), 1.0) as update:

        def on_progress(groups: int, rows: int, share: float | None) -> None:
            facts = f"{counted(groups, 'group')} read, {counted(rows, 'row')} compared"
            update(completed=share, facts=facts)

        report, model = run_loop(verify_source(settings, on_progress))
    if settings.as_json:
        show_json({"source": settings.source, "model": model, **report.facts()})
    else:
        _show_report(Console(), report, f"{settings.source} against {model}")
    return 0 if report.verdict in ("exact", "within_tolerance") else 1


def _show_report(console: Console, report: Report, title: str) -> None:
    from .console import table

    console.say(title)
    console.say(_VERDICTS[report.verdict])
    console.print(table(("", "number", ""), _sums(report), right=("number",), show_header=False))
    if report.worst:
        console.say("Largest differences of logprobs:")
        numbers = ("line", "row", "place", "token", "recorded", "now", "off by")
        rows = map(_worst, report.worst[:_WORST_SHOWN])
        header = ("line", "rollout", *numbers[1:])
        console.print(table(header, rows, right=numbers, padding=(0, 0, 0, 1)))
    for finding in report.findings[:_FINDINGS_SHOWN]:
        console.say(f"{finding.kind}: {finding.place}: {finding.message}")
    if (more := report.kinds.total() - _FINDINGS_SHOWN) > 0:
        console.say(f"... and {counted(more, 'finding')} more.")


def _sums(report: Report) -> Iterator[tuple[str, str, str]]:
    from ..rollouts.audit import NOT_COMPARED

    totals = report.totals.facts()
    count = totals["tokens"]
    version = "" if report.version < 0 else f"policy version {report.version}"
    yield "groups", f"{report.groups:,}", ""
    if report.unsealed:
        words = "written by an older version or another program: changes cannot be detected"
        yield "  without digest", f"{report.unsealed:,}", words
    yield "rows", f"{report.rows:,}", "each checked separately"
    for reason, number in report.not_compared.most_common():
        tokens = counted(report.tokens_not_compared[reason], "trained token")
        yield "  not compared", f"{number:,}", f"{NOT_COMPARED[reason]} ({tokens})"
    yield "  compared", f"{totals['rows']:,}", version
    yield "trained tokens", f"{count:,}", "in the compared rows"
    if count:
        exact, over = totals["tokens_exactly_equal"], totals["tokens_over_tolerance"]
        yield "  exactly equal", f"{exact:,}", _percent(exact, count)
        words = f"{_percent(over, count)}, in {counted(totals['rows_over_tolerance'], 'row')}"
        yield f"  off by over {totals['tolerance']:g}", f"{over:,}", words
        largest, mean = totals["largest_difference"], totals["mean_difference"]
        yield "largest difference", f"{largest:.3g}", f"mean {mean:.3g}"
        kl = f"k1 {totals['kl_k1']:.3g}, k3 {totals['kl_k3']:.3g}"
        yield "KL estimates", "", f"{kl} (recorded policy to engine, per token)"
    for kind, number in report.kinds.most_common():
        yield f"[red]{kind}[/]", f"{number:,}", ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g} %"


def _worst(worst: Difference) -> tuple[str, ...]:
    return (
        "-" if worst.line is None else str(worst.line),
        worst.rollout_id or worst.group_id,
        *map(str, (worst.row, worst.position, worst.token)),
        f"{worst.recorded:.5f}",
        f"{worst.again:.5f}",
        f"{worst.difference:+.2g}",
    )
