"""Documents become text, in pages; hostile ones become a sentence, in bounded time and memory."""

import io
import os
import resource
import struct
import time
import wave
import zipfile
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from envserver_tools.calling import ToolError, use_tool
from envserver_tools.documents import DocumentError, DocumentReader, Limits, document_tools, to_text
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu import cpu_limit
from support.extent import examples

_SECTOR = 512
_LEAST = 4096
"""Shorter streams would live in a second system of smaller sectors."""
_FREE, _END, _TABLE = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD

Streams = dict[str, "bytes | Streams"]


def ole(streams: Streams) -> bytes:
    """A container of `streams`, each filled up with zeros; what is a dict is a folder."""
    sectors: list[bytes] = []
    chain: list[int] = []

    def put(content: bytes) -> int:
        start = len(sectors)
        count = -(-len(content) // _SECTOR)
        sectors.extend(
            content[at : at + _SECTOR].ljust(_SECTOR, b"\0")
            for at in range(0, len(content), _SECTOR)
        )
        chain.extend([*range(start + 1, start + count), _END])
        return start

    entries: list[bytes] = [b""]

    def entry(name: str, kind: int, right: int, child: int, start: int, size: int) -> bytes:
        written = name.encode("utf-16-le") + b"\0\0"
        head = written.ljust(64, b"\0") + struct.pack("<HBB", len(written), kind, 1)
        return head + struct.pack("<III", _FREE, right, child) + bytes(36) + struct.pack(
            "<IQ", start, size
        )  # fmt: skip

    def folder(inner: Streams) -> int:
        """Puts entries, each the right neighbour of the last; the first one's number."""
        last = _FREE
        for name, content in sorted(inner.items(), key=lambda item: (len(item[0]), item[0]))[::-1]:
            number = len(entries)
            entries.append(b"")
            if isinstance(content, dict):
                entries[number] = entry(name, 1, last, folder(content), 0, 0)
            else:
                whole = content.ljust(_LEAST, b"\0")
                entries[number] = entry(name, 2, last, _FREE, put(whole), len(whole))
            last = number
        return last

    entries[0] = entry("Root Entry", 5, _FREE, folder(streams), _END, 0)
    directory = put(b"".join(entries).ljust(-(-len(entries) // 4) * _SECTOR, b"\0"))
    table = len(sectors)
    numbers = [*chain, _TABLE]
    assert len(numbers) <= _SECTOR // 4, "one sector of table is all that this writes"
    sectors.append(struct.pack(f"<{len(numbers)}I", *numbers).ljust(_SECTOR, b"\xff"))
    head = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    head += struct.pack("<HHHHH6xIIIIIIIII", 0x3E, 3, 0xFFFE, 9, 6, 0, 1, directory, 0, _LEAST,
                        _END, 0, _END, 0)  # fmt: skip
    head += struct.pack("<I", table)
    return head.ljust(_SECTOR, b"\xff") + b"".join(sectors)


def xls(sheet: str, rows: list[list[str | float]]) -> bytes:
    """A workbook of Excel 97 with one sheet."""

    def record(kind: int, body: bytes = b"") -> bytes:
        return struct.pack("<HH", kind, len(body)) + body

    def begin(kind: int) -> bytes:
        return record(0x809, struct.pack("<HHHHII", 0x600, kind, 0, 0, 0, 6))

    cells = b""
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            place = struct.pack("<HHH", row, column, 0)
            if isinstance(value, str):
                text = struct.pack("<HB", len(value), 1) + value.encode("utf-16-le")
                cells += record(0x204, place + text)
            else:
                cells += record(0x203, place + struct.pack("<d", value))
    name = struct.pack("<BB", len(sheet), 1) + sheet.encode("utf-16-le")
    size = len(begin(5) + record(0x85, bytes(6) + name) + record(0xA))
    head = begin(5) + record(0x85, struct.pack("<IBB", size, 0, 0) + name) + record(0xA)
    return ole({"Workbook": head + begin(16) + cells + record(0xA)})


def msg(subject: str, sender: str, body: str, attached: str) -> bytes:
    """A mail of Outlook, sent at the beginning of 2024."""

    def text(number: str) -> str:
        return f"__substg1.0_{number}001F"

    times = bytes(32) + struct.pack("<HHIQ", 0x40, 0x39, 6, 133_485_408_000_000_000)
    return ole(
        {
            "__properties_version1.0": times,
            text("0037"): subject.encode("utf-16-le"),
            text("0C1A"): sender.encode("utf-16-le"),
            text("1000"): body.encode("utf-16-le"),
            "__attach_version1.0_#00000000": {
                text("3707"): attached.encode("utf-16-le"),
                "__substg1.0_37010102": b"content",
            },
        }
    )


QUICK = Limits(
    seconds=5, memory_mb=256, characters=200_000, input_bytes=16 << 20, unpacked_bytes=16 << 20
)


def zipped(members: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "kind", "part"),
    [
        ("a.txt", b"one\r\ntwo", "txt", "one\ntwo"),
        ("a.csv", "naïve;1".encode("cp1252"), "csv", "naïve;1"),
        ("a.json", b'{"a": [1]}', "json", '{"a": [1]}'),
        ("a.jsonl", '{"a": "é"}\n'.encode("utf-16"), "jsonl", '{"a": "é"}'),
        ("a.xml", b"<a><b>1</b></a>", "xml", "<b>1</b>"),
        ("noname", b"plain", "text", "plain"),
        ("a.bin", b"\0\1\2", "binary", "3 bytes"),
    ],
)
def test_a_file_is_what_its_bytes_and_its_name_say(
    name: str, data: bytes, kind: str, part: str
) -> None:
    text = to_text(data, name)
    assert text.kind == kind
    assert part in text.text


def test_html_keeps_structure_and_drops_scripts() -> None:
    page = b"""<html><head><title>The  page</title><style>x{}</style></head><body>
    <script>var secret=1</script><h1>Head</h1><p>Some <b>bold</b>
    text, <a href="/x">a link</a>.</p><ul><li>one<li>two</ul><ol><li>first</ol>
    <table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><p>2</p></td></tr></table>
    <p>10<sup><sup>6</sup></sup> H<sub>2</sub>O x<sup>n + 1</sup> <s>old</s>
    <img src=x alt="a cat"></p>
    <del><p>gone</p><p>too</p></del><table><tr><td colspan="2">wide</td></tr></table>
    <pre>  kept\n   so f_(x)</pre></body></html>"""
    text = to_text(page, "a.html")
    assert text.title == "The page"
    for part in ("# Head", "Some bold text, [a link](/x).", "- one\n- two", "1. first",
                 "10^6 H_2O x^(n + 1) ~~old~~ [image: a cat]", "~~gone~~\n\n~~too~~",
                 "| (over 2 columns) wide |"):  # fmt: skip
        assert part in text.text
    assert "| a | b |" in text.text
    assert "  kept\n   so f_(x)" in text.text
    assert "secret" not in text.text
    assert "x{}" not in text.text


def test_images_tell_their_size_and_their_words() -> None:
    image = pytest.importorskip("PIL.Image", reason="needs the libraries of the gaia extra")

    def picture(form: str, **options: object) -> bytes:
        out = io.BytesIO()
        image.new("RGB", (640, 480)).save(out, form, **options)
        return out.getvalue()

    for form in ("GIF", "JPEG"):
        text = to_text(picture(form, comment=b"said in it"), "a").text
        assert f"A {form} image, 640 x 480" in text
        assert "comment: said in it" in text
    for form in ("PNG", "BMP", "WEBP", "TIFF"):
        assert f"A {form} image, 640 x 480" in to_text(picture(form), "a").text
    with pytest.raises(DocumentError, match="begins like a jpeg"):
        to_text(b"\xff\xd8\xff\xe0", "a.jpg")


def test_a_member_of_an_archive_is_read_where_it_lies() -> None:
    inner = zipped({"deep/b.csv": b"x,y\n1,2\n"})
    outer = zipped({"inner.zip": inner, "../../etc/passwd": b"not yours", "a.txt": b"hello"})
    listing = to_text(outer, "o.zip").text
    assert "inner.zip" in listing
    assert "leads outside" in listing
    assert to_text(outer, "o.zip", member="inner.zip!deep/b.csv").text == "x,y\n1,2\n"
    with pytest.raises(DocumentError, match="no member"):
        to_text(outer, "o.zip", member="none.txt")
    with pytest.raises(DocumentError, match="deep at most"):
        to_text(outer, "o.zip", member="a!b!c!d")


def test_a_spreadsheet_shows_values_formulas_fills_and_what_is_beside_them() -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="needs the libraries of the gaia extra")
    from openpyxl.cell.rich_text import CellRichText, TextBlock
    from openpyxl.cell.text import InlineFont
    from openpyxl.comments import Comment
    from openpyxl.drawing.image import Image
    from openpyxl.styles import Font, PatternFill

    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Sales"
    sheet.append(["city", "sum"])
    sheet.append(["Köln", 12.0])
    sheet["B4"] = "=SUM(B2:B3)"
    sheet["C2"].fill = PatternFill("solid", fgColor="00FF00")
    sheet["A5"] = CellRichText("10", TextBlock(InlineFont(vertAlign="superscript"), "6"))
    sheet["B5"] = "out"
    sheet["B5"].font = Font(strike=True)
    sheet.merge_cells("A6:B7")
    sheet["A5"].comment = Comment("said\nof it", "Ann")
    sheet["A5"].hyperlink = "https://example.org/a?b=1&c=2"
    sheet.row_dimensions[5].hidden = True
    sheet.column_dimensions.group("D", "F", hidden=True)
    sheet.add_image(Image(small_picture()))
    out = io.BytesIO()
    book.save(out)
    text = to_text(out.getvalue(), "a.xlsx")
    assert text.kind == "xlsx"
    for line in ("## Sheet 'Sales'", "| 1 | city | sum |", "| 2 | Köln | 12 | [fill: #00FF00] |"):
        assert line in text.text
    assert "{=SUM(B2:B3)}" in text.text
    assert "\n| 4 |" in text.text
    for line in ("| 5 | 10^6 | out [struck] |", "Merged cells: A6:B7", "Hidden rows: 5",
                 "Hidden columns: D:F", "Link at A5: https://example.org/a?b=1&c=2",
                 "Comment at A5: said\nof it", "(not shown: Image 1"):  # fmt: skip
        assert line in text.text


def small_picture() -> io.BytesIO:
    image, out = pytest.importorskip("PIL.Image", reason="needs the gaia extra"), io.BytesIO()
    image.new("RGB", (9, 9)).save(out, "PNG")
    return out


MATH = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def with_body(document: object, xml: str) -> bytes:
    """The bytes of a Word document, with a paragraph of `xml` at its end."""
    from docx.oxml import parse_xml

    out = io.BytesIO()
    document.add_paragraph()._p.getparent().insert(-1, parse_xml(f"<w:p {WORD}>{xml}</w:p>"))  # type: ignore[attr-defined]
    document.save(out)  # type: ignore[attr-defined]
    return out.getvalue()


def test_a_text_document_is_read_in_its_order_with_what_lies_beside_it() -> None:
    docx = pytest.importorskip("docx", reason="needs the libraries of the gaia extra")
    document = docx.Document()
    document.sections[0].header.paragraphs[0].text = "Above"
    document.sections[0].footer.paragraphs[0].text = "Below"
    document.add_heading("The head", 2)
    table = document.add_table(rows=1, cols=2)
    table.cell(0, 0).text, table.cell(0, 1).text = "left", "a|b"
    document.add_paragraph("first", style="List Number")
    document.add_paragraph("second", style="List Number")
    numbers = document.add_paragraph("10")
    numbers.add_run("6").font.superscript = True
    numbers.add_run(" H")
    numbers.add_run("2").font.subscript = True
    numbers.add_run("O")
    numbers.add_run("old").font.strike = True
    document.add_comment(runs=numbers.runs[0], text="said of it", author="Ann", initials="A")
    document.add_picture(small_picture())
    document.inline_shapes[0]._inline.docPr.set("descr", "a red cat")
    data = with_body(
        document,
        '<w:ins w:id="1" w:author="a"><w:r><w:t>put in</w:t></w:r></w:ins>'
        '<w:del w:id="2" w:author="a"><w:r><w:delText>taken out</w:delText></w:r></w:del>'
        "<w:sdt><w:sdtContent><w:r><w:t>filled in</w:t></w:r></w:sdtContent></w:sdt>"
        "<w:r><w:rPr><w:vanish/></w:rPr><w:t>unseen</w:t></w:r>"
        f"<m:oMath {MATH}><m:r><m:t>a+b</m:t></m:r></m:oMath>",
    )
    text = to_text(data, "a.docx").text
    parts = ("(header) Above", "## The head", "| left | a\\|b |", "1. first", "2. second",
             "10[A1]^6 H_2O~~old~~", "[image: a red cat]", "put in", "filled in",
             "Comment [A1]", "said of it", "(footer) Below",
             "(tracked changes: 1 insertions, shown; 1 deletions, not shown)",
             "(hidden: unseen)",
             "(a formula, not shown in its place: a+b)")  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "taken out" not in text


def test_slides_tell_their_texts_charts_and_notes() -> None:
    pptx = pytest.importorskip("pptx", reason="needs the libraries of the gaia extra")
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE
    from pptx.opc.constants import RELATIONSHIP_TYPE
    from pptx.opc.package import Part
    from pptx.opc.packuri import PackURI

    show, out = pptx.Presentation(), io.BytesIO()
    slide = show.slides.add_slide(show.slide_layouts[5])
    slide.shapes.title.text = "On the slide"
    slide.notes_slide.notes_text_frame.text = "said aloud"
    title = slide.shapes.title.text_frame.paragraphs[0]
    for words, style in (("6", {"baseline": "30000"}), ("old", {"strike": "sngStrike"})):
        run = title.add_run()
        run.text = words
        run.font._element.attrib.update(style)
    title.runs[0].hyperlink.address = "https://example.org"
    picture = slide.shapes.add_picture(small_picture(), 0, 0)
    picture._element.nvPicPr.cNvPr.set("descr", "a red cat")
    slide._element.set("show", "0")
    said = b'<p:cmLst xmlns:p="urn:p"><p:cm><p:text>said of it</p:text></p:cm></p:cmLst>'
    kind = "application/vnd.openxmlformats-officedocument.presentationml.comments+xml"
    place = PackURI("/ppt/comments/comment1.xml")
    slide.part.relate_to(Part(place, kind, slide.part.package, said), RELATIONSHIP_TYPE.COMMENTS)
    numbers = CategoryChartData()
    numbers.categories = ["East", "West"]
    numbers.add_series("Sales", (19.25, None))
    slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 100, 100, numbers)
    show.save(out)
    text = to_text(out.getvalue(), "a.pptx").text
    for part in ("## Slide 1 (hidden)", "[On the slide](https://example.org)^6~~old~~",
                 "|  | East | West |", "| Sales | 19.25 |  |", ": a red cat)",
                 "Comment: said of it"):  # fmt: skip
        assert part in text
    assert "Notes: said aloud" in text


def test_cells_of_a_pdf_are_never_joined_to_a_number() -> None:
    pytest.importorskip("pypdf", reason="needs the libraries of the gaia extra")
    cells = ") Tj 40 0 Td (".join("0369")
    text = to_text(small_pdf(cells), "a.pdf").text
    assert text.split("---")[-1].split() == ["0", "3", "6", "9"]


def test_a_pdf_tells_its_pictures_links_comments_and_fields() -> None:
    pypdf = pytest.importorskip("pypdf", reason="needs the libraries of the gaia extra")
    from pypdf.annotations import FreeText, Link
    from pypdf.generic import DictionaryObject, NameObject, TextStringObject

    writer, out = pypdf.PdfWriter(clone_from=io.BytesIO(small_pdf("words"))), io.BytesIO()
    field = DictionaryObject({NameObject("/Subtype"): NameObject("/Widget")})
    field |= {NameObject(name): TextStringObject(name[1:]) for name in ("/T", "/V")}
    link, box = "https://example.org", (0, 0, 9, 9)
    for one in (Link(rect=box, url=link), FreeText(text="said of it", rect=box), field):
        writer.add_annotation(0, one)
    picture = DictionaryObject({NameObject("/Subtype"): NameObject("/Image")})
    resources: Any = writer.pages[0]["/Resources"]
    resources[NameObject("/XObject")] = DictionaryObject({NameObject("/I"): picture})
    writer.write(out)
    text = to_text(out.getvalue(), "a.pdf").text
    assert [line for line in text.splitlines() if ": " in line] == [
        "(not shown: 1 pictures)", f"Link: {link}", "Comment: said of it", "Field T: V",
    ]  # fmt: skip


def small_pdf(words: str) -> bytes:
    drawn = f"BT /F1 12 Tf 20 100 Td ({words}) Tj ET".encode()
    parts = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(drawn), drawn),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, start=1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(out)
    return (
        out
        + b"xref\n0 6\n0000000000 65535 f \n%strailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
        % (table, start)
    )


def test_pages_follow_each_other_and_words_are_found(tmp_path: Path) -> None:
    words = "".join(f"line {number}\n" for number in range(5000))
    (tmp_path / "long.txt").write_text(words)
    reader = DocumentReader(tmp_path)
    read, offset = "", 0
    while offset < len(words):
        head, _, page = reader.read("long.txt", offset=offset, limit=7000).partition("\n")
        read += page
        offset += 7000
        assert ("go on with offset=" in head) == (offset < len(words))
    assert read == words
    found = reader.find("long.txt", "LINE 4321")
    assert "1 times" in found
    assert f"at {words.index('line 4321')}:" in found
    with pytest.raises(ToolError, match="behind"):
        reader.read("long.txt", offset=len(words))


async def test_only_files_of_the_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.txt").write_text("the answer")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(tmp_path / "in" / "fifo")
    tools = document_tools(tmp_path / "in")
    for path in ("../secret.txt", "link", "fifo", "none", "", str(tmp_path / "secret.txt"), "\0"):
        result = await use_tool(tools, "read_document", {"path": path})
        assert not result.ok
        assert "the answer" not in result.text


def bomb() -> bytes:
    return zipped({"xl/workbook.xml": b"<x/>", "xl/worksheets/sheet1.xml": bytes(24 << 20)})


def nested(depth: int) -> bytes:
    """A Word document of tables within tables."""
    import docx

    document, out = docx.Document(), io.BytesIO()
    document.save(out)
    opened, closed = b"<w:tbl><w:tr><w:tc>" * depth, b"<w:p/></w:tc></w:tr></w:tbl>" * depth
    with zipfile.ZipFile(out) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    body = parts["word/document.xml"].replace(b"<w:body>", b"<w:body>" + opened + closed)
    return zipped({**parts, "word/document.xml": body})


MANY = ["word/document.xml", *(f"m{i}" for i in range(11_000))]


@pytest.mark.parametrize(
    ("name", "make", "member"),
    [
        ("bomb.xlsx", bomb, ""),
        ("bomb.zip", bomb, "xl/worksheets/sheet1.xml"),
        ("cut.zip", lambda: zipped({"a": b"b" * 1000})[:60], ""),
        ("broken.pdf", lambda: b"%PDF-1.7\n" + b"<<" * 50_000, ""),
        ("many.docx", lambda: zipped(dict.fromkeys(MANY, b"")), ""),
        ("nested.docx", lambda: nested(3000), ""),
    ],
)
def test_hostile_files_are_a_sentence_in_time(
    name: str, make: Callable[[], bytes], member: str
) -> None:
    data = make()
    used = processor_seconds()
    with pytest.raises(DocumentError) as caught:
        to_text(data, name, member=member, limits=QUICK)
    assert len(str(caught.value)) < 1000
    assert processor_seconds() - used < QUICK.seconds + cpu_limit(2)


def processor_seconds() -> float:
    """What the processes that read have used, however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("part", ["xl/workbook", "word/document", "ppt/presentation"])
def test_entities_are_not_multiplied(part: str) -> None:
    pytest.importorskip("openpyxl", reason="needs the libraries of the gaia extra")
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    book = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e0 "lol">{entities}]><x>&e11;</x>'
    folder, _, file = part.partition("/")
    names = ("[Content_Types].xml", f"{part}.xml", "_rels/.rels", f"{folder}/_rels/{file}.xml.rels")
    name = {"xl": "e.xlsx", "word": "e.docx", "ppt": "e.pptx"}[folder]
    used = processor_seconds()
    with pytest.raises(DocumentError):
        to_text(zipped(dict.fromkeys(names, book)), name, limits=QUICK)
    assert processor_seconds() - used < QUICK.seconds + cpu_limit(2)


def test_what_loops_eats_memory_or_dies_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from envserver_tools.documents import reading

    for work, seconds, how in (
        (_loop, 0.2, "longer than 0.2 seconds"),
        (_eat, 60, "needs over 64 MB"),
        (_die, 60, "died"),
    ):
        monkeypatch.setattr(reading, "decoded", work)
        with pytest.raises(DocumentError, match=how):
            to_text(b"words", "a.txt", limits=Limits(seconds=seconds, memory_mb=64))
    monkeypatch.undo()
    long = to_text(b"w" * 3000, "a.txt", limits=Limits(characters=1000))
    assert len(long.text) == 1000
    assert "only the first" in long.notes[0]


def _loop(data: bytes) -> str:
    while True:
        time.sleep(0.01)


def _eat(data: bytes) -> str:
    return str(len(bytes(4 << 30)))


def _die(data: bytes) -> str:
    os.abort()


# Older and open office files, mail, books, sound --------------------------------------------------

ODF = (
    'xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0" '
    'xmlns:draw="urn:oasis:names:tc:opendocument:xmlns:drawing:1.0" '
    'xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0" '
    'xmlns:svg="urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0" '
    'xmlns:presentation="urn:oasis:names:tc:opendocument:xmlns:presentation:1.0" '
    'xmlns:xlink="http://www.w3.org/1999/xlink"'
)


def opendocument(kind: str, body: str, styles: str = "") -> bytes:
    content = f"<office:document {ODF}>{styles}<office:body>{body}</office:body></office:document>"
    mimetype = f"application/vnd.oasis.opendocument.{kind}"
    whole = f'<m:file-entry m:full-path="/" m:media-type="{mimetype}"/>'
    manifest = f'<m:manifest xmlns:m="urn:m">{whole}</m:manifest>'
    return zipped({"mimetype": mimetype, "content.xml": content, "META-INF/manifest.xml": manifest})


def test_old_and_open_spreadsheets_are_tables() -> None:
    pytest.importorskip("python_calamine", reason="needs the libraries of the gaia extra")
    text = to_text(xls("Käse", [["sort", "sum"], ["a|b", 12.0], [], ["late", 0.5]]), "old.xls")
    assert text.kind == "xls"
    for line in ("## Sheet 'Käse'", "| | A | B |", "| 2 | a\\|b | 12 |", "| 4 | late | 0.5 |"):
        assert line in text.text
    rows = (
        '<office:spreadsheet><table:table table:name="One"><table:table-row>'
        '<table:table-cell office:value-type="string"><text:p>x</text:p></table:table-cell>'
        '<table:table-cell office:value-type="float" office:value="2"><text:p>2</text:p>'
        '</table:table-cell></table:table-row><table:table-row table:number-rows-repeated="2">'
        '<table:table-cell table:number-columns-repeated="2"/><table:table-cell '
        'office:value-type="string" table:number-columns-spanned="2"><office:annotation><text:p>'
        'said</text:p></office:annotation><text:p><text:a xlink:href="https://example.org">y'
        "</text:a></text:p></table:table-cell></table:table-row></table:table></office:spreadsheet>"
    )
    text = to_text(opendocument("spreadsheet", rows), "a.ods")
    assert text.kind == "ods"
    for line in ("| 1 | x | 2 |", "Merged cells of 'One': C2:D2", "Comment at C2 of 'One': said",
                 "Link at C2 of 'One': https://example.org"):  # fmt: skip
        assert line in text.text


def test_open_texts_and_slides_keep_their_order() -> None:
    body = (
        '<office:text><text:h text:outline-level="2">Head</text:h>'
        '<text:p>one<text:tab/>two<text:s text:c="3"/>three</text:p>'
        "<table:table><table:table-row><table:table-cell><text:p>l</text:p></table:table-cell>"
        "<table:table-cell><text:p>r</text:p></table:table-cell></table:table-row></table:table>"
        "<text:list><text:list-item><text:p>item</text:p></text:list-item></text:list>"
        "</office:text>"
    )
    assert to_text(opendocument("text", body), "a.odt").text == (
        "## Head\none\ttwo   three\n| l | r |\nitem"
    )
    marked = {
        "T1": '<style:text-properties style:text-position="super 58%"/>',
        "T2": '<style:text-properties style:text-line-through-style="solid"/>',
        "P1": '<style:drawing-page-properties presentation:visibility="hidden"/>',
    }
    styles = "".join(
        f'<style:style style:name="{name}">{style}</style:style>' for name, style in marked.items()
    )
    deletion = "<text:deletion><text:p>taken out</text:p></text:deletion>"
    note = "<text:note-citation>1</text:note-citation><text:p>below</text:p>"
    picture = '<draw:frame draw:name="P"><draw:image/><svg:desc>a red cat</svg:desc></draw:frame>'
    rich = (
        f"<office:text><text:tracked-changes>{deletion}</text:tracked-changes>"
        '<text:p>10<text:span text:style-name="T1">6</text:span> '
        '<text:span text:style-name="T2">old</text:span>'
        f"<text:note>{note}</text:note>"
        "<office:annotation><text:p>said</text:p></office:annotation> "
        f'<text:a xlink:href="https://example.org">go</text:a>{picture}</text:p></office:text>'
    )
    assert to_text(opendocument("text", rich, styles), "a.odt").text == (
        "(tracked changes: 0 insertions, shown; 1 deletions, not shown)\n10^6 ~~old~~[note: below]"
        "[comment: said] [go](https://example.org)(a picture: P: a red cat)"
    )
    hidden = (
        '<office:presentation><draw:page draw:style-name="P1"><presentation:notes><draw:frame>'
        "<draw:text-box><text:p>aloud</text:p></draw:text-box></draw:frame></presentation:notes>"
        "</draw:page></office:presentation>"
    )
    assert to_text(opendocument("presentation", hidden, styles), "a.odp").text == (
        "## Slide 1 (hidden)\nNotes: aloud"
    )
    box = "<draw:frame><draw:text-box><text:p>Hi</text:p></draw:text-box></draw:frame>"
    page = f"<draw:page>{box}</draw:page>"
    shown = opendocument("presentation", f"<office:presentation>{page * 2}</office:presentation>")
    assert to_text(shown, "a.odp").text == "## Slide 1\nHi\n\n## Slide 2\nHi"


def test_a_book_is_read_in_its_order() -> None:
    container = '<container><rootfiles><rootfile full-path="in/b.opf"/></rootfiles></container>'
    package = (
        '<package xmlns:dc="urn:dc"><metadata><dc:title>The Book</dc:title></metadata><manifest>'
        '<item id="1" href="c%201.xhtml"/><item id="2" href="../c2.xhtml"/></manifest>'
        '<spine><itemref idref="2"/><itemref idref="1"/><itemref idref="9"/></spine></package>'
    )
    members = {
        "mimetype": "application/epub+zip", "META-INF/container.xml": container,
        "in/b.opf": package, "in/c 1.xhtml": "<h1>Last</h1>", "c2.xhtml": "<h1>First</h1>",
    }  # fmt: skip
    text = to_text(zipped(members), "a.epub")
    assert (text.kind, text.title, text.text) == ("epub", "The Book", "# First\n\n# Last")
    with pytest.raises(DocumentError, match="not XML"):
        to_text(zipped(members | {"in/b.opf": "<p"}), "a.epub")


def test_mail_tells_its_headers_text_and_attachments() -> None:
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "a@example.org", "b@example.org", "Grüße"
    mail.set_content("The plain text")
    mail.add_alternative("<p>The page</p>", subtype="html")
    mail.add_attachment(b"12345", maintype="application", subtype="pdf", filename="x.pdf")
    text = to_text(bytes(mail), "a.eml").text
    for part in ("From: a@example.org", "Subject: Grüße", "The plain text", "(attached: x.pdf, 5"):
        assert part in text
    pytest.importorskip("olefile", reason="needs the libraries of the gaia extra")
    text = to_text(msg("Grüße", "Ann", "Dear Bob,\r\nbye", "x.pdf"), "a.msg")
    assert text.kind == "msg"
    for part in ("From: Ann", "Subject: Grüße", "Date: 2024-01-01", "Dear Bob,\nbye", "x.pdf"):
        assert part in text.text


def test_sounds_tell_their_length_and_words() -> None:
    pytest.importorskip("tinytag", reason="needs the libraries of the gaia extra")
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(4 * 8000 * 90))
    text = to_text(out.getvalue(), "a.wav")
    assert text.kind == "wav"
    assert "0:01:30 long (90.00 seconds), 8,000 Hz, 16 bits, 2 channels" in text.text


def test_a_text_is_a_text_whatever_its_name_says() -> None:
    for name in ("table.xls", "a.xlsx", "letter.doc", "song.mp3", "mail.msg"):
        assert to_text(b"a;b\n1;2", name).text == "a;b\n1;2"


BEGINNINGS = b"", b"PK\x03\x04", b"%PDF-1.4", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
WHOLE = (
    xls("S", [["a", 1.0]]),
    msg("s", "f", "b", "n"),
    opendocument("text", "<office:text/>"),
    b"ID3\x03\0\0\0\0\0\x05" + bytes(90),
    b"\0\0\0\x18ftypisom" + bytes(90),
)


@settings(max_examples=examples(65), deadline=None)
@given(
    whole=st.sampled_from(WHOLE) | st.sampled_from(BEGINNINGS),
    cut=st.floats(0, 1),
    noise=st.binary(max_size=300),
    name=st.sampled_from(["a.html", "a.csv", "a.xlsx", "a"]),
)
def test_any_bytes_are_text_or_a_sentence(
    whole: bytes, cut: float, noise: bytes, name: str
) -> None:
    """Also files whose middle or end is not theirs."""
    at = len(whole) if whole in BEGINNINGS else int(cut * len(whole))
    try:
        assert isinstance(to_text(whole[:at] + noise + whole[at + len(noise) :], name).text, str)
    except DocumentError as error:
        assert 0 < len(str(error)) < 1000
