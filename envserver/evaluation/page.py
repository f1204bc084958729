"""Reports and comparisons as self-contained HTML pages: no script, no other file.

Data (names of tasks and models, labels) is escaped, with its invisible characters made visible; a
content policy forbids scripts and requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..export.pages import template
from .comparison import Comparison, Paired
from .estimators import Estimate
from .report import Measures, Report, Rules, Suite, TaskRow, attempts_of, passes
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
_MOST_ATTEMPTS = 64
_WIDTH, _HEIGHT = 320.0, 120.0


class Bar(msgspec.Struct, frozen=True):
    """A value with its interval on a line; positions in per cent of the line's length."""

    name: str
    text: str
    tasks: int
    at: float
    low: float
    width: float
    strong: bool = False


Json = dict[str, Any]


def report_page(found: Report | Suite) -> str:
    parts = found.parts if isinstance(found, Suite) else [found]
    return template(__package__, "report.html").render(
        title="Evaluation" if isinstance(found, Suite) else f"Evaluation of {found.env}",
        model=found.model,
        at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found.created_at)),
        warnings=warnings_of(found),
        summary=summary_of(found) if isinstance(found, Suite) else None,
        parts=[_part(part) for part in parts],
        notes_of=notes_of,
        tables_of=lambda one: [table for table in tables_of(one) if table.title != "Results"],
        estimate=estimate_text,
        size=(_WIDTH, _HEIGHT),
    )


def comparison_page(found: Comparison) -> str:
    pairs = [(part.name, part.reward) for part in found.parts]
    if found.together is not None:
        pairs.append((found.together.name, found.together.reward))
    return template(__package__, "comparison.html").render(
        title=f"{found.b} against {found.a}",
        found=found,
        bars=_differences([(name, pair) for name, pair in pairs if pair is not None], found.rules),
        span=_span([pair for _, pair in pairs if pair is not None], found.rules),
        verdicts=verdicts_of(found),
        notes=comparison_notes(found),
        tables=comparison_tables(found),
    )


def _part(report: Report) -> Json:
    rows = sorted(report.run.tasks, key=_worst_first)
    estimates = list(_estimates(report))
    ends = _ends([one for _, one in estimates], report.rules)
    return {
        "report": report,
        "ends": ends,
        "bars": [
            _bar(name, one, ends, strong=number == 0 and report.run.overall is not None)
            for number, (name, one) in enumerate(estimates)
        ],
        "curves": list(_curves(report.run.overall)),
        "tasks": [_task_line(row, report.rules) for row in rows[:MOST_TASKS]],
        "more_tasks": max(0, len(rows) - MOST_TASKS),
    }


def _estimates(report: Report) -> Iterator[tuple[str, Estimate]]:
    """Yields the mean rewards to draw, with their names; that of all tasks first."""
    if report.run.overall is not None:
        yield report.name or report.env, report.run.overall.mean_reward
    for name, run in report.baselines.items():
        if run.overall is not None:
            yield f"baseline {name}", run.overall.mean_reward
    for label, values in report.run.by.items():
        for value, measures in values.items():
            yield f"{label} {value}", measures.mean_reward


def _ends(estimates: Sequence[Estimate], rules: Rules) -> tuple[float, float]:
    found = [value for one in estimates for value in _interval(one)]
    return min([rules.worst, *found]), max([rules.best, *found])


def _interval(found: Estimate) -> tuple[float, float]:
    low = found.value if found.low is None else found.low
    return low, found.value if found.high is None else found.high


def _bar(name: str, found: Estimate, ends: tuple[float, float], *, strong: bool = False) -> Bar:
    low, high = (_percent(value, ends) for value in _interval(found))
    return Bar(
        name=name,
        text=estimate_text(found),
        tasks=found.tasks,
        at=_percent(found.value, ends),
        low=low,
        width=high - low,
        strong=strong,
    )


def _span(pairs: Sequence[Paired], rules: Rules) -> float:
    """Returns the largest difference that two mean rewards can have, or have."""
    found = [abs(value) for pair in pairs for value in _interval(pair.difference)]
    return max([rules.best - rules.worst, *found])


def _differences(pairs: Sequence[tuple[str, Paired]], rules: Rules) -> list[Bar]:
    span = _span([pair for _, pair in pairs], rules)
    bars = []
    for name, pair in pairs:
        bar = _bar(name, pair.difference, (-span, span), strong=pair.test.p_value < 0.05)
        bars.append(msgspec.structs.replace(bar, text=estimate_text(pair.difference, "+")))
    return bars


def _percent(value: float, ends: tuple[float, float]) -> float:
    low, high = ends
    return round(100 * min(1.0, max(0.0, (value - low) / (high - low))), 2)


def _curves(overall: Measures | None) -> Iterator[Json]:
    if overall is not None and len(overall.pass_at) >= 2:
        yield {"name": "pass@k", "points": _points(overall.pass_at), "kind": "some"}
        yield {"name": "pass^k", "points": _points(overall.pass_hat), "kind": "every"}


def _points(values: Mapping[int, Estimate]) -> str:
    last = max(values)
    places = (
        ((k - 1) / (last - 1) * _WIDTH, (1 - found.value) * _HEIGHT) for k, found in values.items()
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _worst_first(row: TaskRow) -> tuple[float, str]:
    return (_mean(row.rewards) if row.rewards else -math.inf, row.task_id)


def _task_line(row: TaskRow, rules: Rules) -> Json:
    cells = [
        (f"s{_shade(reward, rules)}", f"{reward:.3g}{', cut off' if was_cut else ''}")
        for reward, was_cut in attempts_of(row)
    ]
    cells += [("lost", "lost to infrastructure")] * row.lost
    return {
        "task_id": row.task_id,
        "labels": ", ".join(f"{name} {value}" for name, value in row.labels.items()),
        "mean": f"{_mean(row.rewards):.3f}" if row.rewards else "-",
        "cells": cells[:_MOST_ATTEMPTS],
        "more": max(0, len(cells) - _MOST_ATTEMPTS),
    }


def _shade(reward: float, rules: Rules) -> int:
    """Returns a shade from 0 (no more than the environment's lowest reward) to 5 (a success)."""
    if reward <= rules.worst or passes(reward, rules):
        return 0 if reward <= rules.worst else 5
    share = (reward - rules.worst) / (rules.pass_at - rules.worst)
    return 1 + min(3, math.floor(share * 4))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
