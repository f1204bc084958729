"""Converts xls, xlsb and ods spreadsheets to tables of values.

One compiled library reads all three; it does not report formulas and fills.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from .office import MOST_COLUMNS, column_letters, joined, plain

_MOST_ROWS = 200_000


def sheets(data: bytes, most: int) -> str:
    """Returns every sheet as a table with cell addresses."""
    import python_calamine

    book = python_calamine.CalamineWorkbook.from_filelike(io.BytesIO(data))
    return joined(_book(book), most)


def _book(book: Any) -> Iterator[str]:
    yield "Cells stand with their values alone. The first column holds the row's number."
    for name in book.sheet_names:
        yield f"\n## Sheet {name!r}"
        rows = book.get_sheet_by_name(name).to_python(skip_empty_area=False, nrows=_MOST_ROWS)
        yield from _table(rows)


def _table(rows: list[list[Any]]) -> Iterator[str]:
    headed = 0
    for number, row in enumerate(rows, start=1):
        cells = [_cell(value) for value in row[:MOST_COLUMNS]]
        while cells and not cells[-1]:
            cells.pop()
        if not cells:
            continue
        if len(cells) > headed:
            headed = len(cells)
            yield f"| | {column_letters(headed)} |"
        yield f"| {number} | {' | '.join(cells)} |"


def _cell(value: object) -> str:
    return plain(value).replace("|", "\\|").replace("\n", " / ")
