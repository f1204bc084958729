"""The console on which commands show tables, bars and lines: rich's, safe for any text."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from ..telemetry.redaction import printable

if TYPE_CHECKING:
    from rich.progress import Progress


def show_json(facts: Any) -> None:
    plain = msgspec.to_builtins(facts, str_keys=True)
    sys.stdout.write(orjson.dumps(plain, option=orjson.OPT_INDENT_2).decode() + "\n")


def show_rows(rows: Sequence[Sequence[str]]) -> None:
    """Prints a plain table, whose last column a terminal shows in several lines."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    start = sum(widths[:-1])
    room = max(20, shutil.get_terminal_size((1 << 20, 24)).columns - start)
    for row in rows:
        first, *others = textwrap.wrap(
            row[-1], room, break_long_words=False, break_on_hyphens=False
        ) or [""]
        print("".join([*map(str.ljust, row[:-1], widths), first]).rstrip())
        for line in others:
            print(" " * start + line)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    *,
    right: Collection[str] = (),
    **look: Any,
) -> Table:
    """A table whose long texts are folded. `right`: columns of numbers; `look`: as rich has it."""
    made = Table(**({"box": None, "padding": (0, 2, 0, 1)} | look))
    for name in header:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


class Console(rich.console.Console):  # noqa: TID251
    """A console that shows control characters of its texts as escapes: they come from models, tasks
    and engines, and only rich itself moves the cursor and sets colours."""

    def say(self, text: str, style: str | None = None) -> None:
        """Prints `text` as it is: without markup, colours of rich's own and line breaks."""
        self.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, keep="\n\t"), style)


OnProgress = Callable[[int, int], None]
"""Called with the number of documents read, and their bytes."""


@contextlib.contextmanager
def facts_bar(console: Console, total: float | None) -> Iterator[Callable[..., None]]:
    """Yields a function that takes `facts`, and what is `completed` of `total` or the `advance`."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.fields[facts]}"),
        progress.BarColumn(bar_width=24),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    with progress.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        yield partial(bar.update, bar.add_task("", total=total, facts="reading"))


def count_bars(console: Console, *more: str, transient: bool = True) -> Progress:
    """Bars of tasks by their descriptions; `more`: formats of further columns."""
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        *map(progress.TextColumn, more),
        console=console,
        transient=transient,
    )


@contextlib.contextmanager
def reading_bar(noun: str, total_bytes: int | None) -> Iterator[OnProgress]:
    with facts_bar(Console(stderr=True), total_bytes) as update:
        yield lambda count, size: update(completed=size, facts=f"{count:,} {noun}")
