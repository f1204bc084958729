"""A report as tables of text, for terminals and for report.md. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from .estimators import Estimate
from .report import CORRECT, Measures, Report, RunReport

_FAILURES = {"drop": "are left out", "zero": "count as 0"}


class TextTable(msgspec.Struct, frozen=True):
    """A table; the first cell of a row names it."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables_of(report: Report) -> list[TextTable]:
    """Results, results by number of attempts, what happened, means."""
    tables = [_results(report), _by_attempts(report), _events(report), _means(report)]
    return [table for table in tables if table.rows]


def notes_of(report: Report) -> list[str]:
    """How the numbers are to be read, a sentence or two each."""
    rules, counts = report.rules, report.run.counts
    notes = [
        f"Tasks: {counts.tasks}; attempts at each: {rules.group_size}; an attempt passes with a "
        f"reward of at least {rules.pass_at:g}. In brackets: intervals of 95 % (bootstrap over "
        "tasks; one without width says nothing of other tasks).",
        f"Attempts lost by our fault ({counts.lost} of {counts.lost + counts.scored}) "
        f"{_FAILURES[rules.failures]} (--failures {rules.failures}).",
    ]
    if not report.complete:
        notes.append("Not complete: the evaluation did not come to its end.")
    if report.simulated:
        notes.append("The model was simulated: these rewards are no measure of any real one.")
    return notes


def markdown_of(report: Report) -> str:
    """The whole report."""
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.created_at))
    lines = [f"# Evaluation of {report.env}", ""]
    lines += [f"Model {_cell(report.model)}, split {report.split}, {at}.", ""]
    lines += [f"- {note}" for note in notes_of(report)]
    for table in tables_of(report):
        lines += ["", f"## {table.title}", "", *_markdown_table(table)]
    return "\n".join(lines) + "\n"


def _markdown_table(table: TextTable) -> Iterator[str]:
    yield _row(table.header)
    yield _row(["---", *["---:"] * (len(table.header) - 1)])
    for row in table.rows:
        yield _row(row)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _runs(report: Report) -> dict[str, RunReport]:
    return {report.env: report.run} | {
        f"baseline {name}": run for name, run in report.baselines.items()
    }


def _results(report: Report) -> TextTable:
    size = report.rules.group_size
    header = ["", "tasks", "attempts", f"avg@{size}", "pass@1", f"pass@{size}", f"pass^{size}"]
    rows = []
    if report.run.overall is not None:
        rows.append([report.env, *_measures(report.run.overall, size)])
    for name, run in report.baselines.items():
        if run.overall is not None:
            rows.append([f"baseline {name}", *_measures(run.overall, size)])
        if (found := report.differences.get(name)) is not None:
            rows.append([f"above {name}", str(found.tasks), "", _estimate(found, "+"), "", "", ""])
    for label, values in report.run.by.items():
        rows += [[f"{label} {value}", *_measures(one, size)] for value, one in values.items()]
    if size == 1:  # the last two say the same as pass@1
        header, rows = header[:-2], [row[:-2] for row in rows]
    return TextTable("Results", header, rows)


def _measures(found: Measures, size: int) -> list[str]:
    return [
        str(found.tasks),
        str(found.rollouts),
        _estimate(found.mean_reward),
        _estimate(found.pass_at.get(1)),
        _estimate(found.pass_at.get(size)),
        _estimate(found.pass_hat.get(size)),
    ]


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
            row += [_estimate(overall.pass_at.get(k)), _estimate(overall.pass_hat.get(k))]
            row.append(str(tasks))
        rows.append(row)
    return TextTable("By number of attempts", header, rows)


def _events(report: Report) -> TextTable:
    runs = list(_runs(report).values())
    facts: dict[str, list[str]] = {
        "tasks": [str(run.counts.tasks) for run in runs],
        "tasks without a score": [str(run.counts.tasks_lost) for run in runs],
        "attempts scored": [str(run.counts.scored) for run in runs],
        "attempts lost by our fault": [str(run.counts.lost) for run in runs],
        "attempts cut off": [str(run.counts.truncated) for run in runs],
    }
    for limit in sorted({name for run in runs for name in run.counts.limits}):
        facts[f"ended by limit {limit}"] = [str(run.counts.limits.get(limit, 0)) for run in runs]
    for kind in sorted({name for run in runs for name in run.counts.failed}):
        facts[f"failed, perhaps tried again: {kind}"] = [
            str(run.counts.failed.get(kind, 0)) for run in runs
        ]
    rows = [[name, *values] for name, values in facts.items()]
    return TextTable("What happened", ["", *_runs(report)], rows)


def _means(report: Report) -> TextTable:
    runs = [_means_of(run) for run in _runs(report).values()]
    names = dict.fromkeys(name for run in runs for name in run)
    rows = [[name, *(_number(run.get(name)) for run in runs)] for name in names]
    return TextTable("Means over attempts", ["", *_runs(report)], rows)


def _means_of(run: RunReport) -> dict[str, float]:
    costs = msgspec.structs.asdict(run.costs) if run.costs is not None else {}
    costs.pop("total_tokens", None)
    own = {f"component {name}": value for name, value in run.components.items()}
    metrics = {name: value for name, value in run.metrics.items() if not name.startswith(CORRECT)}
    return costs | own | {f"metric {name}": value for name, value in metrics.items()}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _estimate(found: Estimate | None, sign: str = "") -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.value:{sign}.3f}"
    return f"{found.value:{sign}.3f} [{found.low:{sign}.2f}, {found.high:{sign}.2f}]"
