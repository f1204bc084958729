"""`envserver check`: shows the report of a check on the terminal, as a card or as a page
(Markdown)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..running.run_settings import CheckSettings
from ..telemetry.redaction import counted
from . import lean_imports
from .command_line import CommandSpec, read_run_spec

if TYPE_CHECKING:
    from ..rollouts.check_data import (
        DataReport,
        EnvironmentReport,
        Kind,
        Lengths,
        Played,
        Repeats,
        ScoringCost,
        Wrong,
    )
    from ..rows.columns import RowCount
    from .console import Console


SUMMARY = """Checks an environment without a model: the simulated engine answers its rollouts with
demonstrations, correct and spoiled; correct results get the expected score; empty, absurd and
cheating results get nothing; tasks are the same each time they are listed and do not show hidden
fields. All rows of your own data are examined: the fields that are used, dropped and doubtful rows,
the answers, repeated questions, lengths. Exit status 0: all checks pass; 1: a check fails; 2: the
command line is wrong."""

COMMAND = CommandSpec(
    "check",
    SUMMARY,
    CheckSettings,
    usage="NAME",
    arguments=("environment",),
    frequent=(
        *("environment", "env.split", "env.seed", "tasks", "plays", "processes"),
        *("rows", "evaluation_set", "tokenizer", "context_tokens", "markdown", "card", "as_json"),
        *("sandbox.backend", "log_level"),
    ),
)


def run(argv: list[str]) -> int:
    with lean_imports():
        from ..running.checking import check_environment
        from .console import Console, count_bars, show_json
        from .loop import run_loop, show_logs

    line = read_run_spec(COMMAND, argv)
    show_logs(line.settings)
    with count_bars(Console(stderr=True)) as bar:
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


def _show(console: Console, report: EnvironmentReport) -> None:
    from rich.box import SIMPLE_HEAD

    from .console import table

    look: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1), "pad_edge": False}
    right = ("scored", "least", "most", "plays", "solved", "mean", "turns")
    console.print(table(_RESULTS, _results(report), right=right, **look))
    if report.plays:
        console.print(table(_PLAYS, map(_play, report.plays), right=right, **look))
    for title, lines in sections(report).items():
        console.say("\n".join([f"{title}:", *(f"  {line}" for line in lines), ""]))
    for finding in (*report.notes, *report.problems):
        console.say(finding)
    if report.scoring is not None:
        limit = report.scoring.limit_cpu_seconds
        console.say(f"A score takes {cost_of(report.scoring)} (limit {limit:g} s).")
    all_of = "all" if report.whole else "the first"
    console.say(f"{report.environment}, {report.split}: {all_of} {counted(report.tasks, 'task')}.")
    if report.without_gold:
        console.say(f"No correct result is known for {counted(len(report.without_gold), 'task')}.")
    console.say("All checks passed." if report.ok else "Checks FAILED: see above.")


_RESULTS = ("result", "scored", "lowest", "highest", "expected", "verdict")
_PLAYS = ("model says", "rollouts", "solved", "lowest", "mean", "highest", "turns", "ended by")


def _results(report: EnvironmentReport) -> Iterator[tuple[str, ...]]:
    for kind in report.kinds:
        scored = str(kind.count), number(kind.least), number(kind.most)
        yield (kind.name, *scored, expected(kind), verdict(kind))


def _play(play: Played) -> tuple[str, ...]:
    scored = len(play.rewards)
    rewards = min(play.rewards, default=None), play.mean, max(play.rewards, default=None)
    turns = f"{play.turns / scored:.1f}" if scored else "-"
    return (play.way, str(scored), str(play.solved), *map(number, rewards), turns, ended_by(play))


_WRONG_SHOWN = 5
_FIELDS_SHOWN = 20


def card(report: EnvironmentReport) -> str:
    lines = _markdown(("checked", "found"), _rows(report))
    if cheats := [play for play in report.plays if play.cheat]:
        header = ("the model only says", "tasks solved", "mean reward")
        rows = (
            (cheat.way, f"{cheat.solved} of {len(cheat.rewards)}", number(cheat.mean))
            for cheat in cheats
        )
        lines += ["", *_markdown(header, rows)]
    return "\n".join(lines) + "\n"


def page(report: EnvironmentReport) -> str:
    lines = [f"# `envserver check`: {report.environment}, {report.split}", "", card(report)]
    rows = ((name, scored, *rest) for name, scored, _, _, *rest in _results(report))
    lines += ["## Results", "", *_markdown(("result", "scored", "expected", "verdict"), rows)]
    for title, found in sections(report).items():
        lines += ["", f"## {title}", "", *(f"- {_cell(line)}" for line in found)]
    return "\n".join(lines) + "\n"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def sections(report: EnvironmentReport) -> dict[str, list[str]]:
    data = report.data
    rows = [line for name, count in data.counts.items() for line in _row_lines(name, count)]
    looked_at = f"{'All' if data.whole else 'The first'} {counted(data.rows, 'row')} checked."
    scored: list[Kind | Played] = [*report.kinds, *report.plays]
    seen: dict[str, Wrong] = {}
    found = {
        "Wrong results": [line for kind in scored for line in _wrong(kind, seen)],
        "Rows": [*rows, looked_at],
        "Fields": [line for count in data.counts.values() for line in _field_lines(count)],
        "Repeated questions": list(map(_repeat_line, data.repeats)),
        "Lengths in tokens": [*map(_length_line, data.lengths), _tokenizer_line(data)],
    }
    return {title: lines for title, lines in found.items() if lines}


def _row_lines(name: str, count: RowCount) -> Iterator[str]:
    from ..rows.columns import causes

    dropped = sum(places.count for places in count.dropped.values())
    yield f"{name}: {count.read} rows read, {count.used} used, {dropped} dropped"
    yield from (f"dropped: {cause}" for cause in causes(count.dropped))
    yield from (f"doubtful: {cause}" for cause in causes(count.doubtful))


def _field_lines(count: RowCount) -> Iterator[str]:
    from ..rows.columns import causes

    most = count.fields.most_common(_FIELDS_SHOWN)
    yield from (f"{name} in {counted(rows, 'row')}" for name, rows in most)
    if len(count.layouts) > 1:
        yield f"{len(count.layouts)} layouts are mixed:"
        yield from causes(count.layouts)


def _repeat_line(repeats: Repeats) -> str:
    first = "; ".join(f"{place} as {other}" for place, other in repeats.places)
    return f"{repeats.what}: {repeats.count}" + (f" (first: {first})" if first else "")


def _length_line(lengths: Lengths) -> str:
    shares = ", ".join(
        f"{share} % up to {tokens}" if share < 100 else f"longest {tokens}"
        for share, tokens in lengths.percentiles.items()
    )
    over = "".join(
        f"; {counted(count, 'row')} over {name} ({limit})"
        for name, (limit, count) in lengths.over.items()
        if count or lengths.what == "prompt"
    )
    return f"{lengths.what}: {shares}{over}"


def _tokenizer_line(data: DataReport) -> str:
    from ..rollouts.check_data import BYTES_PER_TOKEN

    if data.tokenizer:
        return f"Counted with {data.tokenizer}; prompts without system prompt and tools."
    return (
        f"Estimated at one token for {BYTES_PER_TOKEN} bytes, without system prompt and tools; "
        "--tokenizer counts exactly."
    )


def _wrong(checked: Kind | Played, seen: dict[str, Wrong]) -> Iterator[str]:
    """Yields lines for wrong results; for those that raise the same error only the first."""
    from ..rollouts.check_data import Kind
    from ..running.checking import DEMONSTRATION

    if isinstance(checked, Kind):
        name, awaited = checked.name, expected(checked)
    else:
        name = f"Ran: {checked.way}"
        awaited = "a solved task" if checked.way == DEMONSTRATION else ""
    shown = [
        wrong
        for wrong in checked.wrong
        if not wrong.raised or seen.setdefault(wrong.error, wrong) is wrong
    ]
    for wrong in shown[:_WRONG_SHOWN]:
        place = f"{name}, task {wrong.task_id}" + (f" ({wrong.place})" if wrong.place else "")
        result = wrong.error or f"reward {wrong.reward:g}"
        yield f"{place}: {result}" + (f"; expected {awaited}" if awaited else "")
    if len(shown) > _WRONG_SHOWN:
        yield f"{name}: {len(shown) - _WRONG_SHOWN} more"


def expected(kind: Kind) -> str:
    if kind.expected_least == kind.expected_most:
        return f"{kind.expected_least:g}"
    return f"{kind.expected_least:g} to {kind.expected_most:g}"


def verdict(kind: Kind) -> str:
    text = f"WRONG: {len(kind.wrong)}" if kind.wrong else "ok"
    return f"{text} ({kind.raised} raise)" if kind.raised else text


def _rows(report: EnvironmentReport) -> Iterator[tuple[str, str]]:
    from ..running.checking import DEMONSTRATION, SPOILED

    names = {DEMONSTRATION: "demonstrations", SPOILED: "spoiled demonstrations"}
    whole = "all" if report.whole else "first"
    yield "verdict", "passes `envserver check`" if report.ok else "FAILS `envserver check`"
    yield "tasks", f"{whole} {report.tasks} of `{report.split}`"
    low, high, solved_at = report.reward_range
    ends = "no limit" if low is None else f"{low:g}", "no limit" if high is None else f"{high:g}"
    yield "rewards", f"{ends[0]} to {ends[1]}, a task is solved at {solved_at:g}"
    right = [kind for kind in report.kinds if kind.expected_least > 0]
    yield "right results", _as_expected(right)
    yield (
        "wrong, absurd and cheating results",
        _as_expected([kind for kind in report.kinds if kind not in right]),
    )
    if not report.demonstrations_solve:
        yield "a game", "demonstrations are fair play, which may lose, and a cheat may win"
    for play in report.plays:
        if not play.cheat:
            yield f"{names.get(play.way, play.way)}, played", _distribution(play)
    if report.scoring is not None:
        yield "a score takes", cost_of(report.scoring)
    yield from (("note", note) for note in report.notes)
    yield from (("problem", problem) for problem in report.problems)


def _as_expected(kinds: list[Kind]) -> str:
    count = sum(kind.count for kind in kinds)
    wrong = sum(len(kind.wrong) for kind in kinds)
    return f"{count - wrong} of {count} as expected" if count else "none known"


def _distribution(play: Played) -> str:
    text = (
        f"{play.solved} of {len(play.rewards) + len(play.wrong) - _judged(play)} solve their task"
    )
    if play.rewards:
        text += f", mean reward {play.mean:.2g}, {play.turns / len(play.rewards):.1f} turns"
    return f"{text}; {ended}" if (ended := ended_by(play)) else text


def _judged(play: Played) -> int:
    return sum(wrong.reward is not None for wrong in play.wrong)


def ended_by(play: Played) -> str:
    failed = len(play.wrong) - _judged(play)
    parts = [f"{limit} {count}" for limit, count in sorted(play.limits.items())]
    return ", ".join([*parts, *([counted(failed, "failure")] if failed else [])])


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def cost_of(scoring: ScoringCost) -> str:
    usual, most = map(_milliseconds, (scoring.cpu_seconds, scoring.most_cpu_seconds))
    return f"{usual} of CPU, at most {most}"


def _milliseconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.2g} ms" if seconds >= 1e-4 else "under 0.1 ms"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
