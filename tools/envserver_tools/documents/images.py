"""Describes an image as text: its format, its size and its embedded metadata."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

KINDS = ("png", "jpeg", "gif", "bmp", "webp")
_MOST_WORDS = 4000
_MOST_TEXTS = 20
_MOST_FACTS = 60
_MOST_VALUE = 200
_COLOURS = {0: "grey", 2: "RGB", 3: "palette", 4: "grey with alpha", 6: "RGB with alpha"}
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG segments that hold the size."""


class BadImage(Exception):
    """The file starts like an image but is not a valid one."""


def kind_of(data: bytes) -> str:
    """Returns "png", "jpeg", "gif", "bmp", "webp", or "" for other data."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"BM") and len(data) > 26 and data[6:10] == b"\0\0\0\0":
        return "bmp"
    return "webp" if data.startswith(b"RIFF") and data[8:12] == b"WEBP" else ""


def facts(data: bytes) -> str:
    """Returns lines that describe the image.

    Raises:
        BadImage: its size cannot be read.
    """
    kind = kind_of(data)
    try:
        match kind:
            case "png":
                lines = _png(data)
            case "jpeg":
                lines = _jpeg(data)
            case "gif":
                width, height = struct.unpack("<HH", data[6:10])
                lines = [_size("GIF", width, height)]
            case "bmp":
                width, height = struct.unpack("<ii", data[18:26])
                lines = [_size("BMP", width, abs(height))]
            case _:
                lines = ["A WebP image."]
    except (struct.error, IndexError) as error:
        raise BadImage(f"it begins like a {kind} image, but is not one.") from error
    lines += _taken(data)
    lines.append(f"{len(data):,} bytes. What it shows is not in this text.")
    return "\n".join(lines)


def _taken(data: bytes) -> list[str]:
    """Returns EXIF data (time, place, device) if Pillow is installed."""
    try:
        from PIL import ExifTags, Image
    except ImportError:
        return []
    fields: dict[str, object] = {}
    try:
        exif = Image.open(io.BytesIO(data)).getexif()
        for names, facts in (
            (ExifTags.TAGS, exif),
            (ExifTags.TAGS, exif.get_ifd(ExifTags.IFD.Exif)),
            (ExifTags.GPSTAGS, exif.get_ifd(ExifTags.IFD.GPSInfo)),
        ):
            fields |= {names.get(key, str(key)): value for key, value in facts.items()}
    except Exception:  # noqa: BLE001 - the other facts of a strange file are shown all the same
        return []
    lines = [
        f"{name}: {str(value)[:_MOST_VALUE]}" for name, value in fields.items() if _is_said(value)
    ]
    return lines[:_MOST_FACTS]


def _is_said(value: object) -> bool:
    return isinstance(value, str | int | float | tuple) or hasattr(value, "numerator")


def _size(name: str, width: int, height: int) -> str:
    return f"A {name} image, {width} x {height} pixels (width x height)."


def _png(data: bytes) -> list[str]:
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    lines = [_size("PNG", width, height)]
    lines.append(f"{depth} bits a channel, {_COLOURS.get(colour, 'unknown colours')}.")
    texts = 0
    for kind, body in _png_chunks(data):
        said = _png_words(kind, body)
        if said:
            lines.append(said)
            texts += 1
        if texts == _MOST_TEXTS:
            break
    return lines


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at + 8 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        at += size + 12


def _png_words(kind: bytes, body: bytes) -> str:
    if kind not in (b"tEXt", b"zTXt", b"iTXt"):
        return ""
    word, _, rest = body.partition(b"\0")
    packed = kind == b"zTXt"
    if kind == b"iTXt":
        packed = rest[:1] == b"\1"
        rest = rest[2:].split(b"\0", 2)[-1]
    elif packed:
        rest = rest[1:]
    if packed:
        try:
            rest = zlib.decompressobj().decompress(rest, _MOST_WORDS)
        except zlib.error:
            return ""
    encoding = "utf-8" if kind == b"iTXt" else "latin-1"
    text = rest[:_MOST_WORDS].decode(encoding, errors="replace")
    return f"{word[:80].decode('latin-1')}: {text}"


def _jpeg(data: bytes) -> list[str]:
    lines: list[str] = []
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        (size,) = struct.unpack(">H", data[at + 2 : at + 4])
        if marker in _FRAMES:
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return [_size("JPEG", width, height), *lines]
        if marker == 0xFE and len(lines) < _MOST_TEXTS:
            comment = data[at + 4 : at + 2 + size][:_MOST_WORDS]
            lines.append(f"Comment: {comment.decode('utf-8', errors='replace')}")
        at += 2 + max(2, size)
    raise BadImage("it begins like a jpeg image but gives no size.")
