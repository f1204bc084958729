"""Converts spreadsheets, slides and PDF to text.

Libraries are imported where they are used. Each reader stops soon after the limit of characters;
the process that runs it limits what the libraries do with hostile files.
"""

from __future__ import annotations

import functools
import html
import io
import posixpath
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time
from itertools import zip_longest
from typing import Any
from xml.etree import ElementTree

from .bounded import Limits
from .html import marked

MOST_COLUMNS = 400
_MOST_EMPTY_ROWS = 2000
"""Consecutive empty rows after which the rest of a sheet counts as empty."""
_MOST_NESTING = 10
_NO = ("0", "false")
_BESIDE = re.compile(r"<(?:\w+:)?(mergeCell|row|col|hyperlink)\s([^>]*)>")
"""What a sheet has beside its cells; to parse all of a large sheet once more takes seconds."""
_ATTRIBUTE = re.compile(r'(?:\w+:)?(\w+)="([^"]*)"')


def xlsx(data: bytes, limits: Limits) -> str:
    """Every sheet as a table with cell addresses: values, formulas and fills; below it what it has
    beside them."""
    import openpyxl
    from openpyxl.worksheet import _read_only, _reader

    # A sheet that is read row by row does not hand this setting on to its parser.
    parser: Any = functools.partial(_reader.WorkSheetParser, rich_text=True)
    vars(_read_only)["WorkSheetParser"] = parser
    how: Any = {"read_only": True, "rich_text": True}
    values = openpyxl.load_workbook(io.BytesIO(data), data_only=True, **how)
    formulas = openpyxl.load_workbook(io.BytesIO(data), **how)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return joined(_workbook(values, formulas, archive), limits.characters)


def _workbook(values: Any, formulas: Any, archive: zipfile.ZipFile) -> Iterator[str]:
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
        yield from _beside_cells(archive, sheet._worksheet_path)


def _beside_cells(archive: zipfile.ZipFile, path: str) -> Iterator[str]:
    """Lines about merged and hidden cells, links, comments and pictures of a sheet."""
    parts = _related(archive, path)
    found: dict[str, list[str]] = defaultdict(list)
    links = []
    for name, inside in _BESIDE.findall(archive.read(path).decode(errors="replace")):
        facts = {key: html.unescape(value) for key, value in _ATTRIBUTE.findall(inside)}
        is_hidden = facts.get("hidden") in ("1", "true")
        if name == "mergeCell":
            found["Merged cells"].append(facts.get("ref", "?"))
        elif name == "row" and is_hidden:
            found["Hidden rows"].append(facts.get("r", "?"))
        elif name == "col" and is_hidden:
            ends = dict.fromkeys(facts.get(end, "1") for end in ("min", "max"))
            found["Hidden columns"].append(":".join(_letters(int(end)) for end in ends))
        elif name == "hyperlink":
            target = parts.get(facts.get("id", ""), ("", ""))[1]
            place = f"#{facts['location']}" if "location" in facts else ""
            links.append(f"Link at {facts.get('ref')}: {target}{place}")
    yield from (f"{what}: {', '.join(places)}" for what, places in found.items())
    yield from links
    for kind, part in parts.values():
        if kind not in ("comments", "drawing") or part not in archive.namelist():
            continue
        for element in ElementTree.fromstring(archive.read(part)).iter():
            if bare(element.tag) == "comment":
                yield f"Comment at {element.get('ref')}: {''.join(element.itertext()).strip()}"
            elif bare(element.tag) == "cNvPr":
                yield f"(not shown: {described(element.get('name'), element.get('descr'))})"


def bare(name: str) -> str:
    return name.rpartition("}")[2]


def _related(archive: zipfile.ZipFile, path: str) -> dict[str, tuple[str, str]]:
    """The parts that a part of an office file refers to: their kind and path, or address, by id."""
    folder, name = posixpath.split(path)
    relations = f"{folder}/_rels/{name}.rels"
    if relations not in archive.namelist():
        return {}
    found = {}
    for relation in ElementTree.fromstring(archive.read(relations)):
        target = relation.get("Target", "")
        if relation.get("TargetMode") != "External":
            target = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
        found[relation.get("Id", "")] = relation.get("Type", "").rpartition("/")[2], target
    return found


def described(name: str | None, text: str | None) -> str:
    return f"{name}: {' '.join(text.split())}" if text else name or "a picture"


def _sheet(values: Any, formulas: Any) -> Iterator[str]:
    pairs = zip_longest(values.iter_rows(), formulas.iter_rows(), fillvalue=())
    rows = (
        [_cell(*pair) for pair in zip_longest(row[:MOST_COLUMNS], sources[:MOST_COLUMNS])]
        for row, sources in pairs
    )
    return numbered(rows, _MOST_EMPTY_ROWS)


def numbered(rows: Iterable[list[str]], most_empty: int) -> Iterator[str]:
    """The rows of a sheet that are not empty, with their numbers, below the letters of their
    columns. After `most_empty` consecutive empty rows the rest counts as empty."""
    empty = headed = 0
    for number, cells in enumerate(rows, start=1):
        while cells and not cells[-1]:
            cells.pop()
        empty = 0 if cells else empty + 1
        if empty > most_empty:
            return
        if len(cells) > headed:
            headed = len(cells)
            yield f"| | {' | '.join(map(_letters, range(1, headed + 1)))} |"
        if cells:
            yield f"| {number} | {' | '.join(map(_escaped, cells))} |"


def _letters(column: int) -> str:
    before, last = divmod(column - 1, 26)
    return (_letters(before) if before else "") + chr(65 + last)


def address(row: int, column: int) -> str:
    """A cell's address, `B2`; both numbers begin at 1."""
    return f"{_letters(column)}{row}"


def _cell(cell: Any, source: Any) -> str:
    value = None if cell is None else cell.value
    parts = [] if value is None else [_rich(value)]
    formula = None if source is None else source.value
    if getattr(source, "data_type", "") == "f":
        parts.append(f"{{{getattr(formula, 'text', formula)}}}")
    if getattr(getattr(cell, "font", None), "strike", None):
        parts.append("[struck]")
    colour = _fill(source if source is not None else cell)
    if colour:
        parts.append(f"[fill: {colour}]")
    return " ".join(parts)


def _rich(value: Any) -> str:
    if not isinstance(value, list):
        return plain(value)
    return "".join(
        item
        if isinstance(item, str)
        else marked(item.text, _mark(item.font.vertAlign, item.font.strike))
        for item in value
    )


def _mark(position: str | None, is_struck: bool | None) -> str:
    raised = {"superscript": "^", "subscript": "_"}.get(position or "", "")
    return "~~" if is_struck else raised


def plain(value: object) -> str:
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


def pptx(data: bytes, limits: Limits) -> str:
    """Each slide's texts, tables, charts, picture names and notes."""
    import pptx

    return joined(_slides(pptx.Presentation(io.BytesIO(data))), limits.characters)


def _slides(presentation: Any) -> Iterator[str]:
    for number, slide in enumerate(presentation.slides, start=1):
        yield f"\n## Slide {number}{' (hidden)' if slide._element.get('show') in _NO else ''}"
        for shape in slide.shapes:
            yield from _shape(shape, 0)
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            notes = slide.notes_slide.notes_text_frame.text.strip()
            if notes:
                yield f"Notes: {notes}"
        for relation in slide.part.rels.values():
            if relation.reltype.endswith("/comments"):
                yield from _comments(relation.target_part.blob)


def _comments(part: bytes) -> Iterator[str]:
    for comment in ElementTree.fromstring(part).iter():
        if bare(comment.tag) == "cm":
            yield f"Comment: {' '.join(''.join(comment.itertext()).split())}"


def _shape(shape: Any, level: int) -> Iterator[str]:
    facts = next(shape._element.iter("{*}cNvPr"))
    words = facts.get("descr")
    if hasattr(shape, "shapes"):
        if level < _MOST_NESTING:
            for inner in shape.shapes:
                yield from _shape(inner, level + 1)
    elif getattr(shape, "has_table", False):
        for row in shape.table.rows:
            yield table_row(_framed(cell.text_frame) for cell in row.cells)
    elif getattr(shape, "has_chart", False):
        yield from _chart(shape.chart)
    elif shape.has_text_frame:
        if text := _framed(shape.text_frame).strip():
            yield text
    elif hasattr(shape, "image"):
        yield f"(a picture: {described(shape.name, words)})"
        return
    elif not shape._element.tag.endswith("}cxnSp"):  # lines between shapes
        yield f"(not shown: {shape.name})"
    if words:
        yield f"(described as: {words})"


def _framed(frame: Any) -> str:
    """The text of a frame; parts of it are raised, lowered, struck, or links."""
    links = {run._r: run.hyperlink.address for part in frame.paragraphs for run in part.runs}
    return "\n".join(
        "".join(_part(part, links.get(part)) for part in paragraph._p.iterchildren())
        for paragraph in frame.paragraphs
    )


def _part(part: Any, address: str | None) -> str:
    if part.tag.endswith("}br"):
        return "\n"
    text = "".join(run.text or "" for run in part.iter("{*}t"))
    style: Any = next(part.iter("{*}rPr"), {})
    raised = (style.get("baseline") or "").strip("0%")
    position = ("subscript" if raised[0] == "-" else "superscript") if raised else None
    text = marked(text, _mark(position, style.get("strike") not in (None, "noStrike")))
    return f"[{text}]({address})" if address else text


def _chart(chart: Any) -> Iterator[str]:
    title = chart.chart_title.text_frame.text if chart.has_title else ""
    yield f"(a chart{f': {title}' if title else ''})"
    for plot in chart.plots:
        yield table_row(["", *(str(category) for category in plot.categories)])
        for series in plot.series:
            yield table_row(
                [series.name, *("" if value is None else plain(value) for value in series.values)]
            )


def pdf(data: bytes, limits: Limits) -> str:
    import pypdf

    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        return "(This PDF is encrypted, and its password is not empty.)"
    return joined(_pages(reader), limits.characters)


def _pages(reader: Any) -> Iterator[str]:
    count = len(reader.pages)
    for number in range(count):
        page = reader.pages[number]
        yield f"\n--- page {number + 1} of {count} ---"
        yield page.extract_text().strip() or "(no text: perhaps a picture)"
        objects = _resolved(_resolved(page.get("/Resources")).get("/XObject")).values()
        if pictures := sum(_resolved(resource).get("/Subtype") == "/Image" for resource in objects):
            yield f"(not shown: {pictures} pictures)"
        for facts in map(_resolved, page.annotations or ()):
            if address := _resolved(facts.get("/A")).get("/URI"):
                yield f"Link: {address}"
            elif facts.get("/Subtype") == "/Widget" and facts.get("/V") not in (None, "/Off"):
                yield f"Field {facts.get('/T')}: {facts['/V']}"
            elif facts.get("/Contents") and facts.get("/Subtype") != "/Popup":
                yield f"Comment: {facts['/Contents']}"


def _resolved(value: Any) -> dict[str, Any]:
    """An object of a PDF with what its fields refer to; empty if it is not one."""
    found = value.get_object() if hasattr(value, "get_object") else value
    return {name: found[name] for name in found} if isinstance(found, dict) else {}


def table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_escaped(cell.strip()) for cell in cells)} |"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " / ")


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


_MOST_ROWS = 200_000


def sheets(data: bytes, limits: Limits) -> str:
    """Every sheet as a table with cell addresses."""
    import python_calamine

    book = python_calamine.CalamineWorkbook.from_filelike(io.BytesIO(data))
    return joined(_book(book), limits.characters)


def _book(book: Any) -> Iterator[str]:
    yield (
        "Cells stand with their values alone: formulas, fills and pictures are not shown, nor"
        " comments and links of xls and xlsb. The first column holds the row's number."
    )
    for described in book.sheets_metadata:
        sheet = book.get_sheet_by_name(described.name)
        hidden = "" if str(described.visible).endswith("Visible") else ", hidden"
        yield f"\n## Sheet {described.name!r}{hidden}"
        rows = sheet.to_python(skip_empty_area=False, nrows=_MOST_ROWS)
        yield from numbered(([*map(plain, row[:MOST_COLUMNS])] for row in rows), _MOST_ROWS)
        ranges = sheet.merged_cell_ranges or ()
        merged = [
            ":".join(address(row + 1, column + 1) for row, column in corners) for corners in ranges
        ]
        if merged:
            yield f"Merged cells: {', '.join(merged)}"
