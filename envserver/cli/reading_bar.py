"""A progress bar for commands that read files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .console import Console

OnProgress = Callable[[int, int], None]
"""Called with the number of documents read, and their bytes."""


@contextlib.contextmanager
def facts_bar(console: Console, total: float | None) -> Iterator[Callable[..., None]]:
    """Shows facts and the progress on a terminal; elsewhere nothing. In the block, call the result
    with `facts`, and what is `completed` of `total` or the `advance`.
    """
    columns = (
        TextColumn("{task.fields[facts]}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with shown as bar:
        yield partial(bar.update, bar.add_task("", total=total, facts="reading"))


@contextlib.contextmanager
def reading_bar(noun: str, total_bytes: int | None) -> Iterator[OnProgress]:
    """Shows how many documents were read, and their share of all.

    Args:
        noun: the counted items, in the plural.
        total_bytes: size of all files; None: unknown.
    """
    with facts_bar(Console(stderr=True), total_bytes) as update:
        yield lambda count, size: update(completed=size, facts=f"{count:,} {noun}")
