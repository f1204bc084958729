"""A progress bar for commands that read files of documents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .console import Console

OnProgress = Callable[[int, int], None]
"""Called with the number of documents read, and their bytes."""


@contextlib.contextmanager
def reading_bar(noun: str, total_bytes: int | None) -> Iterator[OnProgress]:
    """Shows the reading progress on a terminal; elsewhere nothing.

    Args:
        noun: the counted items, in the plural.
        total_bytes: size of all files; None: unknown.
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

        def on_progress(count: int, size: int) -> None:
            bar.update(task, completed=size, facts=f"{count:,} {noun}")

        yield on_progress
