"""A progress bar for commands that read files of documents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Told = Callable[[int, int], None]
"""Gets how many were read, and their bytes."""


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
