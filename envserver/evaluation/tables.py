"""Reports as tables of text, for terminals, report.md and the page. Pure."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from .comparison import Comparison, Paired, PartComparison
from .estimators import Estimate
from .report import CORRECT, Measures, Report, Rules, RunReport, Suite, attempts_of

_FAILURES = {"drop": "are left out", "zero": "count as 0"}
_TRUNCATED = {"score": "count what they scored", "drop": "are left out", "zero": "count as 0"}
_INTERVALS = (
    "In brackets: 95 % intervals (bootstrap over tasks; one of zero width says nothing about "
    "other tasks)."
)


class TextTable(msgspec.Struct, frozen=True):
    """A table; the first cell of a row names it."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables_of(report: Report) -> list[TextTable]:
    tables = [
        _results(report),
        _robustness(report),
        _by_attempts(report),
        _by_run("Steps", report, _steps_of),
        _by_run("Outcomes", report, _events_of, lacking="0"),
        _by_run("Tokens, time and cost", report, _took_of),
        _harness(report),
        _by_run("Means over attempts", report, _means_of),
    ]
    return [table for table in tables if table.rows]


def notes_of(report: Report) -> list[str]:
    notes = [_who_measured(report), *_denominators(report.rules, report)]
    if report.prices is not None:
        prices = report.prices
        notes.append(
            f"Prices of a million tokens: {prices.prompt:g} {prices.currency} for prompts, "
            f"{prices.completion:g} for completions ({prices.source}); tokens of failed attempts "
            "are not counted."
        )
    return [*notes, *warnings_of(report)]


def warnings_of(report: Report | Suite) -> list[str]:
    if isinstance(report, Suite):
        sentences = (
            f"{part.name}: {note}"
            for part in report.parts
            for note in warnings_of(part)
            if not part.simulated or note != _SIMULATED
        )
        return [*sentences, *([_SIMULATED] if report.simulated else [])]
    found = []
    if not report.complete:
        found.append("Incomplete: the evaluation did not finish.")
    if report.run.counts.tasks_lost:
        lost, tasks = report.run.counts.tasks_lost, report.run.counts.tasks
        found.append(f"{lost} of {tasks} tasks have no score at all.")
    costs = report.run.costs
    if costs is not None and not costs.total_tokens:
        found.append("Token counts are unknown: the engine did not report them.")
    if report.simulated:
        found.append(_SIMULATED)
    return found


_SIMULATED = "The model was simulated: these rewards do not measure a real model."


def _who_measured(report: Report) -> str:
    facts, counts = report.harness, report.run.counts
    if facts is None:
        return (
            f"Tasks: {counts.tasks}; attempts at each: {report.rules.group_size}; an attempt "
            f"passes with a reward of at least {report.rules.pass_at:g}. {_INTERVALS}"
        )
    return (
        f"Measured by lm-evaluation-harness {facts.version}: {counts.tasks} documents, "
        f"{facts.num_fewshot} examples in each prompt, metric {facts.metric} (filter "
        f"{facts.filter}). {_INTERVALS}"
    )


def _denominators(rules: Rules, report: Report) -> list[str]:
    if report.harness is not None:
        return []
    counts = report.run.counts
    return [
        f"Attempts lost to infrastructure ({counts.lost} of {counts.lost + counts.scored}) "
        f"{_FAILURES[rules.failures]} (--failures {rules.failures}); those in which the model was "
        f"cut off ({counts.truncated} of {counts.scored}) {_TRUNCATED[rules.truncated]} "
        f"(--truncated {rules.truncated})."
    ]


def summary_of(suite: Suite) -> TextTable:
    sizes = {part.rules.group_size for part in suite.parts}
    k = str(sizes.pop()) if len(sizes) == 1 else "k"
    header = ["", "tasks", "mean reward", "pass@1", f"pass^{k}", "lost", "cut off"]
    totals = suite.totals
    priced = totals.cost is not None
    rows = [_summary_row(part, priced) for part in suite.parts]
    rows.append(
        [
            "mean",
            str(totals.tasks),
            estimate_text(suite.average),
            estimate_text(suite.average_pass),
            "",
            _share(totals.lost, totals.lost + totals.scored),
            _share(totals.truncated, totals.scored),
            *([_money(totals.cost)] if priced else []),
        ]
    )
    return TextTable("Results", [*header, *([totals.currency] if priced else [])], rows)


def _summary_row(part: Report, priced: bool) -> list[str]:
    overall, counts, size = part.run.overall, part.run.counts, part.rules.group_size
    costs = part.run.costs
    return [
        part.name,
        str(counts.tasks),
        estimate_text(overall.mean_reward if overall else None),
        estimate_text(overall.pass_at.get(1) if overall else None),
        estimate_text(overall.pass_hat.get(size) if overall else None),
        _share(counts.lost, counts.lost + counts.scored),
        _share(counts.truncated, counts.scored),
        *([_money(costs.total_cost if costs else None)] if priced else []),
    ]


def markdown_of(report: Report | Suite) -> str:
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.created_at))
    if isinstance(report, Report):
        lines = [f"# Evaluation of {cell_text(report.env)}", ""]
        lines += [f"Model {cell_text(report.model)}, split {report.split}, {at}.", ""]
        return "\n".join([*lines, *_markdown_part(report, "##")]) + "\n"
    lines = ["# Evaluation", "", f"Model {cell_text(report.model)}, {at}.", "", f"- {_INTERVALS}"]
    lines += [f"- {cell_text(note)}" for note in warnings_of(report)]
    lines += ["", *markdown_table(summary_of(report))]
    for part in report.parts:
        lines += ["", f"## {cell_text(part.name)}", ""]
        lines += [f"Model {cell_text(part.model)}, split {part.split}.", ""]
        lines += _markdown_part(part, "###")
    return "\n".join(lines) + "\n"


def _markdown_part(report: Report, heading: str) -> Iterator[str]:
    yield from (f"- {cell_text(note)}" for note in notes_of(report))
    for table in tables_of(report):
        yield from ("", f"{heading} {table.title}", "", *markdown_table(table))


def markdown_table(table: TextTable) -> Iterator[str]:
    yield _row(table.header)
    yield _row(["---", *["---:"] * (len(table.header) - 1)])
    for row in table.rows:
        yield _row(row)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(cell_text, cells))} |"


def cell_text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _runs(report: Report) -> dict[str, RunReport]:
    return {report.name or report.env: report.run} | {
        _beside(report, name): run for name, run in report.baselines.items()
    }


def _beside(report: Report, name: str) -> str:
    variants = report.robustness.variants if report.robustness else []
    return f"asked as {name}" if name in variants else f"baseline {name}"


def _results(report: Report) -> TextTable:
    size = report.rules.group_size
    header = ["", "tasks", "attempts", f"avg@{size}", "pass@1", f"pass@{size}", f"pass^{size}"]
    rows = []
    if report.run.overall is not None:
        rows.append([report.name or report.env, *_measures(report.run.overall, size)])
    for name, run in report.baselines.items():
        if run.overall is not None:
            rows.append([_beside(report, name), *_measures(run.overall, size)])
        if (found := report.differences.get(name)) is not None:
            rows.append(
                [f"above {name}", str(found.tasks), "", estimate_text(found, "+"), "", "", ""]
            )
    for label, values in report.run.by.items():
        rows += [
            [f"{label} {value}", *_measures(measured, size)] for value, measured in values.items()
        ]
    if size == 1:  # the last two equal pass@1
        header, rows = header[:-2], [row[:-2] for row in rows]
    return TextTable("Results", header, rows)


def _measures(found: Measures, size: int) -> list[str]:
    return [
        str(found.tasks),
        str(found.rollouts),
        estimate_text(found.mean_reward),
        estimate_text(found.pass_at.get(1)),
        estimate_text(found.pass_at.get(size)),
        estimate_text(found.pass_hat.get(size)),
    ]


def _robustness(report: Report) -> TextTable:
    found = report.robustness
    rows = (
        []
        if found is None
        else [
            ["both pass or both fail", estimate_text(found.consistency)],
            ["reward with the worst variant", estimate_text(found.worst_reward)],
            ["passes with the worst variant", estimate_text(found.worst_pass)],
        ]
    )
    ways = 0 if found is None else len(found.variants) + 1
    return TextTable("Robustness", ["", f"in {ways} variants"], rows)


def _by_attempts(report: Report) -> TextTable:
    runs = {name: run.overall for name, run in _runs(report).items() if run.overall is not None}
    header = ["k"]
    for name in runs:
        header += [f"pass@k {name}", f"pass^k {name}", "tasks"]
    rows = []
    for k in range(1, report.rules.group_size + 1) if report.rules.group_size > 1 else ():
        row = [str(k)]
        for overall in runs.values():
            tasks = overall.pass_at[k].tasks if k in overall.pass_at else 0
            row += [estimate_text(overall.pass_at.get(k)), estimate_text(overall.pass_hat.get(k))]
            row.append(str(tasks))
        rows.append(row)
    return TextTable("By number of attempts", header, rows)


def _by_run(
    title: str, report: Report, facts_of: Callable[[RunReport], dict[str, str]], lacking: str = "-"
) -> TextTable:
    """Returns a table with a column for each run; `lacking` stands for what a run lacks."""
    runs = {name: facts_of(run) for name, run in _runs(report).items()}
    names = dict.fromkeys(name for facts in runs.values() for name in facts)
    rows = [[name, *(facts.get(name, lacking) for facts in runs.values())] for name in names]
    return TextTable(title, ["", *runs], rows)


def _steps_of(run: RunReport) -> dict[str, str]:
    return {name: estimate_text(found) for name, found in run.steps.items()}


def _events_of(run: RunReport) -> dict[str, str]:
    counts = run.counts
    return {
        "tasks": str(counts.tasks),
        "tasks without a score": str(counts.tasks_lost),
        "attempts scored": str(counts.scored),
        "attempts lost to infrastructure, of all": _share(counts.lost, counts.lost + counts.scored),
        "attempts cut off, of those scored": _share(counts.truncated, counts.scored),
        **{f"ended by limit {name}": str(n) for name, n in sorted(counts.limits.items())},
        **{f"failed (may be retried): {name}": str(n) for name, n in sorted(counts.failed.items())},
    }


def _took_of(run: RunReport) -> dict[str, str]:
    costs = run.costs
    if costs is None:
        return {}
    facts = {
        "prompt tokens": f"{costs.total_prompt_tokens:,}",
        "completion tokens": f"{costs.total_completion_tokens:,}",
        "seconds of attempts": _number(costs.total_seconds),
        "seconds in sandboxes": _number(costs.total_sandbox_seconds),
        "seconds of scoring": _number(costs.total_scoring_seconds),
        "tokens of the judge": f"{costs.total_judge_tokens:,}",
    }
    if costs.currency:
        facts |= {
            f"cost ({costs.currency})": _money(costs.total_cost),
            f"per attempt ({costs.currency})": _money(costs.cost),
            f"per passing attempt ({costs.currency})": _money(costs.cost_of_pass),
        }
    return facts


def _harness(report: Report) -> TextTable:
    values = report.harness.values if report.harness is not None else {}
    rows = [
        [name, _number(value), _number(values.get(name.replace(",", "_stderr,", 1)))]
        for name, value in values.items()
        if "_stderr" not in name
    ]
    return TextTable("The harness's own numbers", ["metric, filter", "value", "error"], rows)


def _means_of(run: RunReport) -> dict[str, str]:
    means = {name: getattr(run.costs, name) for name in _PER_ATTEMPT if run.costs is not None}
    means |= {f"component {name}": value for name, value in run.components.items()}
    means |= {
        f"metric {name}": value
        for name, value in run.metrics.items()
        if not name.startswith(CORRECT)
    }
    return {name: _number(value) for name, value in means.items()}


_PER_ATTEMPT = ("turns", "prompt_tokens", "completion_tokens", "seconds")


def _share(part: int, all_of_them: int) -> str:
    return f"{part} of {all_of_them}" + (f" ({part / all_of_them:.1%})" if part else "")


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1 else f"{value:,.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"


def estimate_text(found: Estimate | None, sign: str = "") -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.value:{sign}.3f}"
    return f"{found.value:{sign}.3f} [{found.low:{sign}.2f}, {found.high:{sign}.2f}]"


MOST_CHANGES = 20
"""Tasks shown at each end: the largest losses and the largest gains."""
_MOST_NAMED = 5
_LEVEL = 0.05


def comparison_tables(found: Comparison) -> list[TextTable]:
    rewards = [(measure.name, measure.reward) for measure in _all(found)]
    passed = [(measure.name, measure.passed) for measure in _all(found)]
    tables = [
        _paired_table("Mean reward", found, rewards),
        _paired_table(
            f"Attempts that pass (reward of at least {found.rules.pass_at:g})",
            found,
            passed if passed != rewards else [],
        ),
        _fourfold(found),
        _changes(found),
        TextTable(
            "Settings that differ",
            ["", found.a, found.b],
            [[name, _said(ours), _said(theirs)] for name, (ours, theirs) in found.settings.items()],
        ),
    ]
    return [table for table in tables if table.rows]


def verdicts_of(found: Comparison) -> list[str]:
    verdicts = []
    for part in _all(found):
        verdict = "No task counts on both sides: nothing could be compared."
        if part.reward is not None:
            verdict = _verdict(part.reward, found)
        verdicts.append(verdict if len(found.parts) == 1 else f"{part.name}: {verdict}")
    return verdicts


def comparison_notes(found: Comparison) -> list[str]:
    return [
        *_about_tasks(found),
        *found.warnings,
        f"Tasks are paired by their ids; both sides are counted alike (--failures "
        f"{found.rules.failures}, --truncated {found.rules.truncated}). In brackets: 95 % "
        "intervals of the difference (bootstrap over tasks). p: two-sided sign-flip test "
        "of the pairs"
        + (
            ", exact (for one attempt at each task it is McNemar's)."
            if all(part.reward is None or part.reward.test.exact for part in found.parts)
            else "; where there are too many for an exact one, of random signs (*)."
        ),
    ]


def comparison_markdown(found: Comparison) -> str:
    lines = [f"# {cell_text(found.b)} against {cell_text(found.a)}", ""]
    models = f"Models: {cell_text(found.models[0])} (first), {cell_text(found.models[1])} (second)."
    lines += [models, "", *map(cell_text, verdicts_of(found)), ""]
    lines += [f"- {cell_text(note)}" for note in comparison_notes(found)]
    for table in comparison_tables(found):
        lines += ["", f"## {cell_text(table.title)}", "", *markdown_table(table)]
    return "\n".join(lines) + "\n"


def _all(found: Comparison) -> list[PartComparison]:
    return [*found.parts, *([found.together] if found.together is not None else [])]


def _verdict(pair: Paired, found: Comparison) -> str:
    p = pair.test.p_value
    size = f"by {abs(pair.difference.value):.3f} in mean reward (p = {_p(p)})"
    if p >= _LEVEL:
        return f"No difference is shown: {pair.difference.value:+.3f} in mean reward, p = {_p(p)}."
    which, other = (found.b, found.a) if pair.difference.value > 0 else (found.a, found.b)
    return f"{which} is better than {other} {size}."


def _about_tasks(found: Comparison) -> Iterator[str]:
    for names, side in ((found.parts_of_a, found.a), (found.parts_of_b, found.b)):
        if names:
            yield f"Only {side} has {', '.join(names)}."
    for part in found.parts:
        for ids, side in ((part.only_a, found.a), (part.only_b, found.b)):
            if ids:
                yield f"{part.name}: {_named(ids)} of {side} only: left out."
        if part.other_tasks:
            yield (
                f"{part.name}: {_named(part.other_tasks)} with the same id but a different "
                "question on each side: left out."
            )


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    word = "task" if len(ids) == 1 else "tasks"
    return f"{len(ids)} {word} ({', '.join(ids[:_MOST_NAMED])}{more})"


def _paired_table(
    title: str, found: Comparison, pairs: list[tuple[str, Paired | None]]
) -> TextTable:
    header = ["", "tasks", found.a, found.b, "difference", "p", "better", "worse", "equal"]
    rows = [
        [
            name,
            str(pair.tasks),
            f"{pair.a:.3f}",
            f"{pair.b:.3f}",
            estimate_text(pair.difference, "+"),
            _p(pair.test.p_value) + ("" if pair.test.exact else " *"),
            *map(str, (pair.better, pair.worse, pair.equal)),
        ]
        for name, pair in pairs
        if pair is not None
    ]
    return TextTable(title, header, rows)


def _fourfold(found: Comparison) -> TextTable:
    header = ["", "both", f"only {found.a}", f"only {found.b}", "neither"]
    rows = [
        [part.name, *map(str, msgspec.structs.astuple(part.fourfold))]
        for part in _all(found)
        if part.fourfold is not None
    ]
    return TextTable("Tasks passed by", header, rows)


def _changes(found: Comparison) -> TextTable:
    losses = [change for change in found.changes if change.b < change.a][:MOST_CHANGES]
    gains = [change for change in found.changes if change.b > change.a][-MOST_CHANGES:]
    left_out = len(found.changes) - len(losses) - len(gains)
    title = "Tasks that differ most" + (f" ({left_out} more differ)" if left_out else "")
    rows = [
        [
            change.task_id if len(found.parts) == 1 else f"{change.part}: {change.task_id}",
            f"{change.a:.3f}",
            f"{change.b:.3f}",
            f"{change.b - change.a:+.3f}",
        ]
        for change in [*losses, *gains]
    ]
    return TextTable(title, ["", found.a, found.b, "difference"], rows)


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _said(value: object) -> str:
    return "-" if value is None else str(value)


COLUMNS = ("evaluation", "environment", "model", "run", "task_id", "attempt", "reward", "truncated")


def csv_of(reports: Sequence[Report]) -> str:
    """Returns the scored attempts of each run; what a spreadsheet takes for a formula is quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for report in reports:
        for name, run in {"": report.run, **report.baselines}.items():
            start = [_plain(text) for text in (report.name, report.env, report.model, name)]
            for task in run.tasks:
                for attempt, (reward, was_cut) in enumerate(attempts_of(task), 1):
                    writer.writerow([*start, _plain(task.task_id), attempt, reward, int(was_cut)])
    return out.getvalue()


def _plain(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
