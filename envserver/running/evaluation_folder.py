"""The folder of an evaluation as commands write it: what is run there, and its report.

What holds: a folder is of one run and its settings; the report in it is what `read_folder` makes of
its files, in three forms that say the same (`report.json`, `report.md`, `report.html`).
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
from ..evaluation.suite import Suite
from ..evaluation.tables import markdown_of
from ..export.unified import write_json

_NAMES = ("env", "sampling")


def claim(folder: Path, wanted: RunFile, *, resume: bool, overwrite: bool) -> None:
    """Sees that `folder` is new, or of the same run, and writes there what is run.

    Parts that were there stay parts of it.

    Raises:
        ConfigError: it is of another run, or of one that is not to be gone on with.
        InputError: what it says of its run cannot be read.
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
            hint="Resume with what it was begun with, or name another folder.",
        )
    differing = [] if old.environment == new.environment else [f"env {old.environment}"]
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
    """What is run in `folder`.

    Raises:
        StoreError: it cannot be written.
    """
    write_json(folder / RUN_FILE, msgspec.to_builtins(run))


def write_tasks(path: Path, tasks: Iterable[TaskFacts]) -> None:
    """What reports need to know of tasks, whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    write_text(path, "".join(f"{msgspec.json.encode(one).decode()}\n" for one in tasks))


def write_report(folder: Path, view: View) -> Report | Suite:
    """Makes the report of a folder from its files, and the one of each of its parts.

    Raises:
        InputError, StoreError: it holds no evaluation, a file cannot be read, or written.
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
    return report


def write_text(path: Path, text: str) -> None:
    """Whole or not at all; the folder is made.

    Raises:
        StoreError: it cannot be written.
    """
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text, sync=False)
