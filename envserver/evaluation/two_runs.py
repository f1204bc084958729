"""Reads runs that are compared: folders of `evaluate` or `lm-eval`, or what `process` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envserver_records.errors import InputError, UsageError

from .folders import View, read_folder, read_run_file
from .group_files import report_of_files
from .report import Report


def read_run(path: Path, view: View) -> dict[str, Report]:
    """Returns the reports of a run by the names of its parts.
    Raises InputError: there is no such run, or its files cannot be read.
    """
    if path.is_dir() and (read_run_file(path) is not None or not any(path.rglob("*.jsonl*"))):
        return {one.name or one.env: one for one in read_folder(path, view)}
    if not path.exists():
        raise InputError(f"There is no {path}.", place=str(path))
    return {one.env: one for one in report_of_files(path, view)}


def called_alike(a: Mapping[str, Report], b: Mapping[str, Report]) -> dict[str, Report]:
    """Returns the reports of `b`, named as those of `a` where both have the same one environment.
    Raises UsageError: they have no environment in common.
    """
    if len(a) == len(b) == 1:  # one environment each: whatever they are called
        (name, one), (_, other) = *a.items(), *b.items()
        b = {name: other} if one.env == other.env else b
    if not set(a) & set(b):
        raise UsageError(
            f"One run has {', '.join(a)}, the other has {', '.join(b)}: they have no environment "
            "in common."
        )
    return dict(b)
