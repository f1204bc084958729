"""Converts spreadsheets, slides and PDF to text.

Libraries are imported where they are used. Each reader stops soon after `most` characters; the
process that runs it limits what the libraries do with hostile files.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time
from itertools import zip_longest
from typing import Any

MOST_COLUMNS = 400
_MOST_EMPTY_ROWS = 2000
"""Consecutive empty rows after which the rest of a sheet counts as empty."""
_MOST_NESTING = 10


def xlsx(data: bytes, most: int) -> str:
    """Returns every sheet as a table with cell addresses: values, formulas and fills."""
    import openpyxl

    values = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    formulas = openpyxl.load_workbook(io.BytesIO(data), read_only=True)
    return joined(_workbook(values, formulas), most)


def _workbook(values: Any, formulas: Any) -> Iterator[str]:
    yield (
        "Cells stand as: value {=formula} [fill: colour]. The first column holds the row's number."
    )
    for name in values.sheetnames:
        sheet = values[name]
        hidden = "" if sheet.sheet_state == "visible" else f", {sheet.sheet_state}"
        yield f"\n## Sheet {name!r}{hidden}"
        if not hasattr(sheet, "iter_rows"):
            yield "(a chart)"
            continue
        yield from _sheet(sheet, formulas[name])


def _sheet(values: Any, formulas: Any) -> Iterator[str]:
    empty = 0
    headed = 0
    pairs = zip_longest(values.iter_rows(), formulas.iter_rows(), fillvalue=())
    for number, (row, sources) in enumerate(pairs, start=1):
        cells = [
            _cell(cell, source)
            for cell, source in zip_longest(row[:MOST_COLUMNS], sources[:MOST_COLUMNS])
        ]
        while cells and not cells[-1]:
            cells.pop()
        if not cells:
            empty += 1
            if empty > _MOST_EMPTY_ROWS:
                return
            continue
        empty = 0
        if len(cells) > headed:
            headed = len(cells)
            yield f"| | {column_letters(headed)} |"
        yield f"| {number} | {' | '.join(cells)} |"


def column_letters(count: int) -> str:
    """Returns "A | B | ... | Z | AA ...", `count` letters."""
    return " | ".join(
        ("" if index < 26 else chr(64 + index // 26)) + chr(65 + index % 26)
        for index in range(count)
    )


def _cell(cell: Any, source: Any) -> str:
    value = None if cell is None else cell.value
    parts = [] if value is None else [plain(value)]
    formula = None if source is None else source.value
    if getattr(source, "data_type", "") == "f":
        parts.append(f"{{{getattr(formula, 'text', formula)}}}")
    colour = _fill(source if source is not None else cell)
    if colour:
        parts.append(f"[fill: {colour}]")
    return " ".join(parts).replace("|", "\\|").replace("\n", " / ")


def plain(value: object) -> str:
    """Formats a cell's value."""
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    if isinstance(value, datetime | date | time):
        return value.isoformat(*(["minutes"] if isinstance(value, time) else []))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _fill(cell: Any) -> str:
    fill = getattr(cell, "fill", None)
    if fill is None or not fill.fill_type:
        return ""
    colour = fill.fgColor
    if colour.type == "rgb" and isinstance(colour.rgb, str):
        return f"#{colour.rgb[-6:]}"
    if colour.type == "indexed":
        from openpyxl.styles.colors import COLOR_INDEX

        known = colour.indexed < len(COLOR_INDEX)
        return f"#{COLOR_INDEX[colour.indexed][-6:]}" if known else f"indexed {colour.indexed}"
    return f"theme {colour.theme}" + (f" tint {colour.tint:.2f}" if colour.tint else "")


def pptx(data: bytes, most: int) -> str:
    """Returns each slide's texts, tables, charts, picture names and notes."""
    import pptx

    return joined(_slides(pptx.Presentation(io.BytesIO(data))), most)


def _slides(presentation: Any) -> Iterator[str]:
    for number, slide in enumerate(presentation.slides, start=1):
        yield f"\n## Slide {number}"
        for shape in slide.shapes:
            yield from _shape(shape, 0)
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            notes = slide.notes_slide.notes_text_frame.text.strip()
            if notes:
                yield f"Notes: {notes}"


def _shape(shape: Any, level: int) -> Iterator[str]:
    if hasattr(shape, "shapes"):
        if level < _MOST_NESTING:
            for inner in shape.shapes:
                yield from _shape(inner, level + 1)
    elif getattr(shape, "has_table", False):
        for row in shape.table.rows:
            yield table_row(cell.text for cell in row.cells)
    elif getattr(shape, "has_chart", False):
        yield from _chart(shape.chart)
    elif shape.has_text_frame:
        if shape.text_frame.text.strip():
            yield shape.text_frame.text
    elif hasattr(shape, "image"):
        yield f"(a picture: {shape.name})"


def _chart(chart: Any) -> Iterator[str]:
    title = chart.chart_title.text_frame.text if chart.has_title else ""
    yield f"(a chart{f': {title}' if title else ''})"
    for plot in chart.plots:
        yield table_row(["", *(str(category) for category in plot.categories)])
        for series in plot.series:
            yield table_row(
                [series.name, *("" if one is None else plain(one) for one in series.values)]
            )


def pdf(data: bytes, most: int) -> str:
    """Returns the text of each page under its number."""
    import pypdf

    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        return "(This PDF is encrypted, and its password is not empty.)"
    return joined(_pages(reader), most)


def _pages(reader: Any) -> Iterator[str]:
    count = len(reader.pages)
    for number in range(count):
        yield f"\n--- page {number + 1} of {count} ---"
        yield reader.pages[number].extract_text().strip() or "(no text: perhaps a picture)"


def table_row(cells: Iterable[str]) -> str:
    """Formats one table row."""
    texts = (cell.strip().replace("|", "\\|").replace("\n", " / ") for cell in cells)
    return f"| {' | '.join(texts)} |"


def joined(parts: Iterable[str], most: int) -> str:
    """Joins lines, stopping soon after `most` characters."""
    taken: list[str] = []
    size = 0
    for part in parts:
        taken.append(part)
        size += len(part) + 1
        if size > most:
            break
    return "\n".join(taken).strip("\n")
