"""A report as CSV, for spreadsheets and data frames: one line for each attempt. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from .report import Report

COLUMNS = ("evaluation", "environment", "model", "run", "task_id", "attempt", "reward", "truncated")


def csv_of(reports: Sequence[Report]) -> str:
    """Returns the attempts that have a score, of the model and of each baseline.

    `run` is empty for the model's own run. A text that a spreadsheet would take for a formula
    follows an apostrophe.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for report in reports:
        for name, run in {"": report.run, **report.baselines}.items():
            start = [_plain(text) for text in (report.name, report.env, report.model, name)]
            for task in run.tasks:
                cut = task.truncated or [False] * len(task.rewards)
                for attempt, (reward, was_cut) in enumerate(zip(task.rewards, cut, strict=True), 1):
                    writer.writerow([*start, _plain(task.task_id), attempt, reward, int(was_cut)])
    return out.getvalue()


def _plain(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
