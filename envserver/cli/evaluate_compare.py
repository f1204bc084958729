"""`envserver evaluate compare A B`: compares two evaluations task by task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..evaluation.comparison import Comparison, compare
from ..evaluation.folders import View, called_alike, read_run
from ..evaluation.page import comparison_page
from ..evaluation.tables import (
    comparison_markdown,
    comparison_notes,
    comparison_tables,
    verdicts_of,
)
from ..export.unified import write_json
from ..running.evaluation_folder import write_text
from .console import Console, show_json
from .evaluate_command import show_tables
from .specs.evaluate_compare import COMMAND, CompareSettings


def run(argv: list[str]) -> int:
    """Runs the command; returns 0 whatever the result."""
    settings = COMMAND.read(argv)
    found = _compared(settings)
    if settings.out is not None:
        _write(settings.out, found)
    if settings.as_json:
        show_json(found)
        return 0
    console = Console()
    for verdict in verdicts_of(found):
        console.say(verdict, style="bold")
    show_tables(console, comparison_tables(found), comparison_notes(found))
    if settings.out is not None:
        console.say(f"Written to {settings.out}")
    return 0


def _compared(settings: CompareSettings) -> Comparison:
    view = View(pass_at=settings.pass_at, failures=settings.failures, truncated=settings.truncated)
    a = read_run(settings.a, view)
    b = called_alike(a, read_run(settings.b, view))
    rules = msgspec.structs.replace(next(iter(a.values())).rules, seed=settings.seed)
    return compare(a, b, rules, names=_names(settings.a, settings.b))


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
