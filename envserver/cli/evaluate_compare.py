"""`envserver evaluate compare A B`: two evaluations held against each other, task by task."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
from envserver_records.errors import InputError, UsageError
from pydantic import Field
from rich.console import Console

from ..config import Section
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
from ..evaluation.report import Failures, Report, Truncated
from ..export.unified import write_json
from ..running.evaluation_folder import write_text
from .command_line import CommandSpec
from .evaluate_command import show_tables

SUMMARY = """Compares two evaluations: folders of `evaluate` or `lm-eval`, or JSONL files of
`process`. Tasks are paired by environment and id; told are the difference of B less A with its
interval, an exact paired test, and the tasks that differ most. What only one of them has is named
and left out. Both are counted by the same rules, from their groups."""


class CompareSettings(Section):
    """The settings that `evaluate compare` has."""

    a: Path
    """The run to compare with (the old one); may be the first word."""
    b: Path
    """The run to be compared (the new one); may be the second word."""
    out: Path | None = None
    """Folder for comparison.json, comparison.md and comparison.html; unset: none is written."""
    pass_at: float | None = Field(default=None, gt=0, le=1)
    """Least reward of an attempt that passes; unset: as A was counted. Also the next two."""
    failures: Failures | None = None
    """Attempts that were lost by our fault are left out (drop), or count as 0 (zero)."""
    truncated: Truncated | None = None
    """Attempts in which the model was cut off count what they scored (score), 0 (zero), or are left
    out (drop)."""
    seed: int = Field(default=0, ge=0)
    """Of intervals, and of random signs where an exact test would take too long."""
    as_json: bool = False
    """Print the comparison as one JSON object."""


COMMAND = CommandSpec(
    "evaluate compare", SUMMARY, CompareSettings, usage="A B", arguments=("a", "b")
)


def run(argv: list[str]) -> int:
    """The command: 0 whatever came out.

    Raises:
        UsageError: there are not two runs, or they have no environment in common.
        InputError: the files of one cannot be read.
    """
    settings = COMMAND.read(argv)
    if settings is None:
        return 0
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
            f"{settings.a} has {', '.join(a)}, {settings.b} has {', '.join(b)}: there is nothing "
            "to compare.",
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
    """The last parts of the paths in which they differ."""
    one, two = a.resolve().parts, b.resolve().parts
    if one[-1] != two[-1]:
        return one[-1], two[-1]
    return ("A", "B") if one == two else (str(a), str(b))


def _write(folder: Path, found: Comparison) -> None:
    facts: Any = msgspec.to_builtins(found, str_keys=True)
    write_json(folder / "comparison.json", facts)
    write_text(folder / "comparison.md", comparison_markdown(found))
    write_text(folder / "comparison.html", comparison_page(found))
