"""Kinds of documents beside the usual ones: older and open office files, mail, books, sound."""

from __future__ import annotations

import io
import wave
import zipfile
from email.message import EmailMessage

import pytest
from envserver_tools.documents import DocumentError, to_text
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.old_files import msg, xls

ODF = (
    'xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0" '
    'xmlns:draw="urn:oasis:names:tc:opendocument:xmlns:drawing:1.0"'
)


def zipped(members: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def opendocument(kind: str, body: str) -> bytes:
    content = f"<office:document {ODF}><office:body>{body}</office:body></office:document>"
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
        "</table:table-cell></table:table-row></table:table></office:spreadsheet>"
    )
    text = to_text(opendocument("spreadsheet", rows), "a.ods")
    assert (text.kind, "| 1 | x | 2 |" in text.text) == ("ods", True)


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
    title = b"TIT2" + (10).to_bytes(4, "big") + b"\0\0\x03The title"
    tagged = b"ID3\x03\0\0" + bytes([0, 0, 0, len(title)]) + title + b"\xff\xfb\x90\0" + bytes(413)
    assert "title: The title" in to_text(tagged, "a.mp3").text


def test_pictures_tell_when_they_were_taken() -> None:
    image = pytest.importorskip("PIL.Image", reason="needs the libraries of the gaia extra")
    exif = image.Exif()
    exif[0x0132], exif[0x010F] = "2023:05:06 07:08:09", "Maker"
    exif.get_ifd(0x8825)[1] = "N"
    out = io.BytesIO()
    image.new("RGB", (4, 3)).save(out, "JPEG", exif=exif)
    text = to_text(out.getvalue(), "a.jpg").text
    for part in ("4 x 3", "DateTime: 2023:05:06 07:08:09", "Make: Maker", "GPSLatitudeRef: N"):
        assert part in text


def test_a_text_is_a_text_whatever_its_name_says() -> None:
    for name in ("table.xls", "a.xlsx", "letter.doc", "song.mp3", "mail.msg"):
        assert to_text(b"a;b\n1;2", name).text == "a;b\n1;2"


@settings(max_examples=examples(25), deadline=None)
@given(
    whole=st.sampled_from(
        [
            xls("S", [["a", 1.0]]),
            msg("s", "f", "b", "n"),
            opendocument("text", "<office:text/>"),
            b"ID3\x03\0\0\0\0\0\x05" + bytes(90),
            b"\0\0\0\x18ftypisom" + bytes(90),
        ]
    ),
    cut=st.floats(0, 1),
    noise=st.binary(max_size=40),
)
def test_broken_ones_are_a_sentence(whole: bytes, cut: float, noise: bytes) -> None:
    at = int(cut * len(whole))
    try:
        assert isinstance(to_text(whole[:at] + noise + whole[at + len(noise) :], "a").text, str)
    except DocumentError as error:
        assert len(str(error)) < 1000
