"""Converts xls, xlsb and ods spreadsheets to tables of values.

One compiled library reads all three; it does not report formulas and fills.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from .bounded import Limits
from .office import MOST_COLUMNS, address, joined, numbered, plain

_MOST_ROWS = 200_000


def sheets(data: bytes, limits: Limits) -> str:
    """Returns every sheet as a table with cell addresses."""
    import python_calamine

    book = python_calamine.CalamineWorkbook.from_filelike(io.BytesIO(data))
    return joined(_book(book), limits.characters)


def _book(book: Any) -> Iterator[str]:
    yield (
        "Cells stand with their values alone: formulas, fills and pictures are not shown, nor"
        " comments and links of xls and xlsb. The first column holds the row's number."
    )
    for one in book.sheets_metadata:
        sheet = book.get_sheet_by_name(one.name)
        yield f"\n## Sheet {one.name!r}{'' if str(one.visible).endswith('Visible') else ', hidden'}"
        rows = sheet.to_python(skip_empty_area=False, nrows=_MOST_ROWS)
        yield from numbered(([*map(plain, row[:MOST_COLUMNS])] for row in rows), _MOST_ROWS)
        ranges = sheet.merged_cell_ranges or ()
        merged = [":".join(address(row + 1, column + 1) for row, column in one) for one in ranges]
        if merged:
            yield f"Merged cells: {', '.join(merged)}"
