"""The console on which commands show tables, bars and lines: rich's, safe for any text."""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from ..telemetry.printable import printable


class Console(rich.console.Console):  # noqa: TID251
    """A console that shows control characters of its texts as escapes.

    Only rich itself moves the cursor and sets colours: texts come from models, tasks and engines.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yields the segments of `renderable`; see rich."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, keep="\n\t"), style)
