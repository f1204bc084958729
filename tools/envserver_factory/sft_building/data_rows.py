"""Yields the rows of a data set, in order: files, folders and globs (`envserver.rows.sources`), or
the hub.

Yields a dict for each row, and None for a line that is not one. Rows of the hub are streamed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envserver_records.errors import InputError

from envserver.rows.sources import Source, streamed

Row = dict[str, Any]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")


def rows_of(source: str, *, limit: int | None = None, split: str = "train") -> Iterator[Row | None]:
    """Yields the rows of `source`.

    Args:
        source: a file, a folder, a glob, or a name on the hub: `owner/name` or `owner/name:config`.
        limit: maximum number of rows.
        split: split of a hub data set, or of a folder with splits.
    """
    is_hub = _HUB_NAME.fullmatch(source) and not Path(source).exists()
    name, _, config = source.partition(":")
    rows = streamed(name, config or None, split) if is_hub else _rows(source, split)
    return itertools.islice(rows, limit)


def _rows(source: str, split: str) -> Iterator[Row | None]:
    rows = Source(source).open(split)
    for number in range(rows.count):
        try:
            yield rows.read(number)
        except InputError:
            yield None
