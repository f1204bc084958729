"""Reports and comparisons as self-contained HTML pages: no script, no other file.

Data (names of tasks and models, labels) is escaped, with its invisible characters made visible; a
content policy forbids scripts and requests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ..export.pages import template
from .comparison import Comparison
from .estimators import Estimate, mean
from .report import Report, Rules, Suite, TaskRow, attempts_of, passes
from .tables import (
    comparison_notes,
    comparison_tables,
    estimate_text,
    notes_of,
    summary_of,
    tables_of,
    verdicts_of,
    warnings_of,
)

MOST_TASKS = 500
"""Tasks listed for each part; report.json has them all."""

Bar = tuple[str, Estimate, bool]
"""Name, value with its interval, and whether it stands out."""
Ends = tuple[float, float]
"""The values at the left and the right end of a line of bars."""


def report_page(found: Report | Suite) -> str:
    parts = found.parts if isinstance(found, Suite) else [found]
    return _template("report.html").render(
        title="Evaluation" if isinstance(found, Suite) else f"Evaluation of {found.env}",
        found=found,
        warnings=warnings_of(found),
        summary=summary_of(found) if isinstance(found, Suite) else None,
        parts=[_part(part) for part in parts],
    )


def comparison_page(found: Comparison) -> str:
    parts = [*found.parts, *([found.together] if found.together is not None else [])]
    pairs = [(part.name, part.reward) for part in parts if part.reward is not None]
    bars = [(name, pair.difference, pair.test.p_value < 0.05) for name, pair in pairs]
    # The largest difference that two mean rewards can have, or have.
    span = max(map(abs, _ends(bars, 0.0, found.rules.best - found.rules.worst)))
    return _template("comparison.html").render(
        title=f"{found.b} against {found.a}",
        found=found,
        bars=bars,
        span=span,
        verdicts=verdicts_of(found),
        notes=comparison_notes(found),
        tables=comparison_tables(found),
    )


def _part(report: Report) -> dict[str, Any]:
    bars = list(_bars(report))
    rows = sorted(report.run.tasks, key=_worst_first)
    return {
        "report": report,
        "bars": bars,
        "ends": _ends(bars, report.rules.worst, report.rules.best),
        "notes": notes_of(report),
        "tables": [table for table in tables_of(report) if table.title != "Results"],
        "tasks": [(row, _cells(row, report.rules)) for row in rows[:MOST_TASKS]],
        "more_tasks": max(0, len(rows) - MOST_TASKS),
    }


def _bars(report: Report) -> Iterator[Bar]:
    """Yields the mean rewards to draw; that of all tasks first."""
    if report.run.overall is not None:
        yield report.name or report.env, report.run.overall.mean_reward, True
    for name, run in report.baselines.items():
        if run.overall is not None:
            yield f"baseline {name}", run.overall.mean_reward, False
    for label, values in report.run.by.items():
        for value, measures in values.items():
            yield f"{label} {value}", measures.mean_reward, False


def _ends(bars: Sequence[Bar], low: float, high: float) -> Ends:
    values = [value for _, found, _ in bars for value in (found.value, found.low, found.high)]
    known = [value for value in values if value is not None]
    return min([low, *known]), max([high, *known])


def _percent(value: float, ends: Ends) -> float:
    low, high = ends
    return round(100 * min(1.0, max(0.0, (value - low) / (high - low))), 2)


def _worst_first(row: TaskRow) -> tuple[float, str]:
    return (mean(row.rewards) if row.rewards else -math.inf, row.task_id)


def _cells(row: TaskRow, rules: Rules) -> list[tuple[str, str]]:
    """Returns the class and the words of each attempt's cell."""
    cells = [
        (f"s{_shade(reward, rules)}", f"{reward:.3g}{', cut off' if was_cut else ''}")
        for reward, was_cut in attempts_of(row)
    ]
    return cells + [("lost", "lost to infrastructure")] * row.lost


def _shade(reward: float, rules: Rules) -> int:
    """Returns a shade from 0 (no more than the environment's lowest reward) to 5 (a success)."""
    if reward <= rules.worst or passes(reward, rules):
        return 0 if reward <= rules.worst else 5
    share = (reward - rules.worst) / (rules.pass_at - rules.worst)
    return 1 + min(3, math.floor(share * 4))


_template: Final = functools.partial(
    template, __package__, estimate=estimate_text, percent=_percent, mean=mean
)
