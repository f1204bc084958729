"""`envserver evaluate compare A B`: compares two evaluations task by task."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
from envserver_records.errors import InputError, UsageError

from ..evaluation.comparison import Comparison, compare
from ..evaluation.comparison_tables import (
    comparison_markdown,
    comparison_notes,
    comparison_tables,
    verdicts_of,
)
from ..evaluation.folders import View, read_folder
from ..evaluation.group_files import report_of_file
from ..evaluation.page import comparison_page
from ..evaluation.report import Report
from ..export.unified import write_json
from ..running.evaluation_folder import write_text
from .console import Console
from .evaluate_command import show_tables
from .specs.evaluate_compare import COMMAND, CompareSettings


def run(argv: list[str]) -> int:
    """Runs the command; returns 0 whatever the result.

    Raises:
        UsageError: a run is missing, or the runs have no environment in common.
        InputError: the files of a run cannot be read.
    """
    settings = COMMAND.read(argv)
    found = _compared(settings)
    if settings.out is not None:
        _write(settings.out, found)
    if settings.as_json:
        facts = msgspec.to_builtins(found, str_keys=True)
        sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode() + "\n")
        return 0
    console = Console()
    for verdict in verdicts_of(found):
        console.print(verdict, style="bold", highlight=False, markup=False, soft_wrap=True)
    show_tables(console, comparison_tables(found), comparison_notes(found))
    if settings.out is not None:
        console.print(f"Written to {settings.out}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _compared(settings: CompareSettings) -> Comparison:
    view = View(pass_at=settings.pass_at, failures=settings.failures, truncated=settings.truncated)
    a, b = _read(settings.a, view), _read(settings.b, view)
    if len(a) == len(b) == 1:  # one environment each: whatever they are called
        b = _called_alike(a, b)
    if not set(a) & set(b):
        raise UsageError(
            f"{settings.a} has {', '.join(a)}, {settings.b} has {', '.join(b)}: they have no "
            "environment in common.",
        )
    rules = msgspec.structs.replace(next(iter(a.values())).rules, seed=settings.seed)
    return compare(a, b, rules, names=_names(settings.a, settings.b))


def _read(path: Path, view: View) -> dict[str, Report]:
    if path.is_dir():
        return {one.name or one.env: one for one in read_folder(path, view)}
    if not path.exists():
        raise InputError(f"There is no {path}.", place=str(path))
    return {one.env: one for one in report_of_file(path, view)}


def _called_alike(a: Mapping[str, Report], b: dict[str, Report]) -> dict[str, Report]:
    (name, one), (_, other) = *a.items(), *b.items()
    return {name: other} if one.env == other.env else b


def _names(a: Path, b: Path) -> tuple[str, str]:
    """Returns display names: the folder names if they differ, the paths otherwise, A and B for the
    same path."""
    one, two = a.resolve().parts, b.resolve().parts
    if one[-1] != two[-1]:
        return one[-1], two[-1]
    return ("A", "B") if one == two else (str(a), str(b))


def _write(folder: Path, found: Comparison) -> None:
    facts: Any = msgspec.to_builtins(found, str_keys=True)
    write_json(folder / "comparison.json", facts)
    write_text(folder / "comparison.md", comparison_markdown(found))
    write_text(folder / "comparison.html", comparison_page(found))
