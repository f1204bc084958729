"""Reports as tables of text, for terminals, report.md and the page. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from .estimators import Estimate
from .report import CORRECT, Costs, Measures, Report, Rules, RunReport
from .suite import Suite

_FAILURES = {"drop": "are left out", "zero": "count as 0"}
_TRUNCATED = {"score": "count what they scored", "drop": "are left out", "zero": "count as 0"}
_INTERVALS = (
    "In brackets: intervals of 95 % (bootstrap over tasks; one without width says nothing of other "
    "tasks)."
)


class TextTable(msgspec.Struct, frozen=True):
    """A table; the first cell of a row names it."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables_of(report: Report) -> list[TextTable]:
    """Returns the tables: results, by number of attempts, steps, counts, costs, means."""
    tables = [
        _results(report),
        _robustness(report),
        _by_attempts(report),
        _steps(report),
        _events(report),
        _took(report),
        _harness(report),
        _means(report),
    ]
    return [table for table in tables if table.rows]


def notes_of(report: Report) -> list[str]:
    """Explains how to read the numbers, in a sentence or two each."""
    notes = [_who_measured(report), *_denominators(report.rules, report)]
    if report.prices is not None:
        prices = report.prices
        notes.append(
            f"Prices of a million tokens: {prices.prompt:g} {prices.currency} for prompts, "
            f"{prices.completion:g} for completions ({prices.source}); what failed attempts took "
            "is not counted."
        )
    return [*notes, *warnings_of(report)]


def warnings_of(report: Report | Suite) -> list[str]:
    """Says why the numbers may mislead."""
    if isinstance(report, Suite):
        told = (
            f"{part.name}: {note}"
            for part in report.parts
            for note in warnings_of(part)
            if not part.simulated or note != _SIMULATED
        )
        return [*told, *([_SIMULATED] if report.simulated else [])]
    found = []
    if not report.complete:
        found.append("Not complete: the evaluation did not come to its end.")
    if report.run.counts.tasks_lost:
        lost, tasks = report.run.counts.tasks_lost, report.run.counts.tasks
        found.append(f"{lost} of {tasks} tasks have no score at all.")
    costs = report.run.costs
    if costs is not None and not costs.total_tokens:
        found.append("Tokens are not known: the engine did not tell them.")
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
    """Returns a row for each part, and their mean."""
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
    """Returns the whole report as Markdown."""
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
    """Returns how a baseline, or a run with other words, is called."""
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
        rows += [[f"{label} {value}", *_measures(one, size)] for value, one in values.items()]
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
            ["reward of the worst way to ask", estimate_text(found.worst_reward)],
            ["passes in the worst way to ask", estimate_text(found.worst_pass)],
        ]
    )
    ways = 0 if found is None else len(found.variants) + 1
    return TextTable("Robustness", ["", f"asked in {ways} ways"], rows)


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


def _steps(report: Report) -> TextTable:
    runs = _runs(report)
    names = dict.fromkeys(name for run in runs.values() for name in run.steps)
    rows = [
        [name, *(estimate_text(run.steps.get(name)) for run in runs.values())] for name in names
    ]
    return TextTable("Steps", ["", *runs], rows)


def _events(report: Report) -> TextTable:
    runs = list(_runs(report).values())
    facts: dict[str, list[str]] = {
        "tasks": [str(run.counts.tasks) for run in runs],
        "tasks without a score": [str(run.counts.tasks_lost) for run in runs],
        "attempts scored": [str(run.counts.scored) for run in runs],
        "attempts lost to infrastructure, of all": [
            _share(run.counts.lost, run.counts.lost + run.counts.scored) for run in runs
        ],
        "attempts cut off, of those scored": [
            _share(run.counts.truncated, run.counts.scored) for run in runs
        ],
    }
    for limit in sorted({name for run in runs for name in run.counts.limits}):
        facts[f"ended by limit {limit}"] = [str(run.counts.limits.get(limit, 0)) for run in runs]
    for kind in sorted({name for run in runs for name in run.counts.failed}):
        facts[f"failed (may be retried): {kind}"] = [
            str(run.counts.failed.get(kind, 0)) for run in runs
        ]
    rows = [[name, *values] for name, values in facts.items()]
    return TextTable("Outcomes", ["", *_runs(report)], rows)


def _took(report: Report) -> TextTable:
    all_costs = [run.costs for run in _runs(report).values()]
    currency = next((one.currency for one in all_costs if one and one.currency), "")
    facts: dict[str, Callable[[Costs], str]] = {
        "prompt tokens": lambda costs: f"{costs.total_prompt_tokens:,}",
        "completion tokens": lambda costs: f"{costs.total_completion_tokens:,}",
        "seconds of attempts": lambda costs: _number(costs.total_seconds),
        "seconds in sandboxes": lambda costs: _number(costs.total_sandbox_seconds),
        "seconds of scoring": lambda costs: _number(costs.total_scoring_seconds),
        "tokens of the judge": lambda costs: f"{costs.total_judge_tokens:,}",
    }
    if currency:
        facts |= {
            f"cost ({currency})": lambda costs: _money(costs.total_cost),
            f"per attempt ({currency})": lambda costs: _money(costs.cost),
            f"per passing attempt ({currency})": lambda costs: _money(costs.cost_of_pass),
        }
    rows = [
        [name, *("-" if costs is None else told(costs) for costs in all_costs)]
        for name, told in facts.items()
    ]
    return TextTable("Tokens, time and cost", ["", *_runs(report)], rows)


def _harness(report: Report) -> TextTable:
    values = report.harness.values if report.harness is not None else {}
    rows = [
        [name, _number(value), _number(values.get(_error_name(name)))]
        for name, value in values.items()
        if "_stderr" not in name
    ]
    return TextTable("The harness's own numbers", ["metric, filter", "value", "error"], rows)


def _error_name(name: str) -> str:
    measure, _, filtered = name.partition(",")
    return f"{measure}_stderr,{filtered}"


def _means(report: Report) -> TextTable:
    runs = [_means_of(run) for run in _runs(report).values()]
    names = dict.fromkeys(name for run in runs for name in run)
    rows = [[name, *(_number(run.get(name)) for run in runs)] for name in names]
    return TextTable("Means over attempts", ["", *_runs(report)], rows)


def _means_of(run: RunReport) -> dict[str, float]:
    costs = msgspec.structs.asdict(run.costs) if run.costs is not None else {}
    costs = {name: value for name, value in costs.items() if name in _PER_ATTEMPT}
    own = {f"component {name}": value for name, value in run.components.items()}
    metrics = {name: value for name, value in run.metrics.items() if not name.startswith(CORRECT)}
    return costs | own | {f"metric {name}": value for name, value in metrics.items()}


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
