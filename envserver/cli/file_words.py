"""What commands over files of documents share: their first words, and a bar while they read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Told = Callable[[int, int], None]
"""Gets how many were read, and their bytes."""


def named_sources(argv: Sequence[str], flag: str = "--sources") -> list[str]:
    """`argv` whose words before the first flag, which are files, stand behind `flag`."""
    words = list(argv)
    first: list[str] = []
    while words and not words[0].startswith("-"):
        first.append(words.pop(0))
    return [flag, json.dumps(first), *words] if first else words


def named_source(argv: Sequence[str], flag: str) -> list[str]:
    """`argv` whose first word, where it is no flag, stands behind `flag`."""
    return [flag, *argv] if argv and not argv[0].startswith("-") else list(argv)


@contextlib.contextmanager
def reading_bar(noun: str, total_bytes: int | None) -> Iterator[Told]:
    """A line on a terminal that says how far the reading is; elsewhere nothing.

    Args:
        noun: what is counted, in the plural.
        total_bytes: of all files; None: not known.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[facts]}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with shown as bar:
        task = bar.add_task("", total=total_bytes, facts="reading")

        def told(count: int, size: int) -> None:
            bar.update(task, completed=size, facts=f"{count:,} {noun}")

        yield told
