"""Writes the folder of an evaluation: its run file, tasks and report.

What holds: a folder belongs to one run and its settings; its report is what `read_folder` makes of
its files, in three forms with the same content (`report.json`, `report.md`, `report.html`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from envserver_records.errors import ConfigError, InputError
from envserver_records.files import replace_file, storing

from ..evaluation.folders import (
    RUN_FILE,
    RunFile,
    View,
    read_folder,
    read_run_file,
    whole,
)
from ..evaluation.page import report_page
from ..evaluation.report import Report
from ..evaluation.results import TaskFacts
from ..evaluation.sheet import csv_of
from ..evaluation.suite import Suite
from ..evaluation.tables import markdown_of
from ..export.unified import write_json

_NAMES = ("env", "sampling", "agent")


def claim(folder: Path, wanted: RunFile, *, resume: bool, overwrite: bool) -> None:
    """Checks that `folder` is new or belongs to the same run, and writes the run file.

    Parts that the run file lists already are kept.

    Raises:
        ConfigError: it belongs to another run, or to one that must not be resumed.
        InputError: its run file cannot be read.
        StoreError: it cannot be written.
    """
    before = None if overwrite else read_run_file(folder)
    if before is not None:
        if not resume:
            raise ConfigError(
                f"{folder} holds an evaluation.",
                hint="Go on with it by --resume, replace it by --overwrite.",
            )
        _check_same(folder, before, wanted)
        wanted.parts = list(dict.fromkeys([*before.parts, *wanted.parts]))
    write_run_file(folder, wanted)


def _check_same(folder: Path, before: RunFile, wanted: RunFile) -> None:
    if before == RunFile():
        path = folder / RUN_FILE
        raise InputError(f"{path} cannot be read: it names no evaluation.", place=str(path))
    old, new = before.evaluated, wanted.evaluated
    if old is None and new is None:
        return
    if old is None or new is None:
        raise ConfigError(
            f"{folder} is of {'several environments' if old is None else old.environment}.",
            hint="Resume with the settings it was started with, or name another folder.",
        )
    differing = [] if old.environment == new.environment else [f"env {old.environment}"]
    if old.shard != new.shard:
        differing.append(f"shard {old.shard or 'of all'}")
    if old.variants != new.variants:
        differing.append(f"--perturb {','.join(old.variants) or 'unset'} and its paraphrases")
    for section in _NAMES:
        ours, theirs = getattr(new, section), getattr(old, section)
        differing += [
            f"{name} {theirs.get(name)} (now {value})"
            for name, value in ours.items()
            if theirs.get(name) != value
        ]
    if differing:
        raise ConfigError(
            f"{folder} is of a run with {', '.join(differing)}.",
            hint="Resume with the settings of that run, or name another folder.",
        )


def write_run_file(folder: Path, run: RunFile) -> None:
    """Writes the description of the run in `folder`. Raises StoreError: it cannot be written."""
    write_json(folder / RUN_FILE, msgspec.to_builtins(run))


def write_tasks(path: Path, tasks: Iterable[TaskFacts]) -> None:
    """Writes what reports need to know of tasks, atomically.
    Raises StoreError: it cannot be written.
    """
    write_text(path, "".join(f"{msgspec.json.encode(one).decode()}\n" for one in tasks))


def write_report(folder: Path, view: View) -> Report | Suite:
    """Makes the report of a folder, and of each of its parts, from its files.
    Raises InputError, StoreError: it holds no evaluation, or a file cannot be read or written.
    """
    reports = read_folder(folder, view)
    run = read_run_file(folder)
    for name in run.parts if run is not None else ():
        _write(folder / name, read_folder(folder / name, view))
    return _write(folder, reports)


def _write(folder: Path, reports: Sequence[Report]) -> Report | Suite:
    report = whole(reports)
    write_json(folder / "report.json", msgspec.to_builtins(report, str_keys=True))
    write_text(folder / "report.md", markdown_of(report))
    write_text(folder / "report.html", report_page(report))
    write_text(folder / "attempts.csv", csv_of(reports))
    return report


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically; creates its folder. Raises StoreError: it cannot be written."""
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text, sync=False)
