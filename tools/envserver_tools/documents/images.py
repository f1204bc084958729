"""Describes an image as text: its format, its size and its embedded metadata."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

_MARKS: Final = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}
KINDS: Final = (*dict.fromkeys(_MARKS.values()), "bmp", "webp")
_MOST_WORDS: Final = 4000
_MOST_TEXTS: Final = 20
_MOST_FACTS: Final = 60
_MOST_VALUE: Final = 200
_MOST_PIXELS: Final = 50_000_000
"""Largest PNG whose pixels are read to find the words that stand behind them."""


class BadImage(Exception):
    """The file starts like an image but is not a valid one."""


def kind_of(data: bytes) -> str:
    """One of KINDS, or "" for other data."""
    if data.startswith(b"BM") and len(data) > 26 and data[6:10] == b"\0\0\0\0":
        return "bmp"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for mark, kind in _MARKS.items() if data.startswith(mark)), "")


def facts(data: bytes) -> str:
    """Lines that describe the image. Raises BadImage: it cannot be read."""
    from PIL import Image

    kind = kind_of(data)
    Image.MAX_IMAGE_PIXELS = None  # its pixels are not shown: size is no danger here
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            lines = [
                f"A {kind.upper()} image, {image.width} x {image.height} pixels (width x height), "
                f"mode {image.mode}.",
                *_words(image),
                *_taken(image),
            ]
    except Exception as error:  # Pillow has many: its parsers raise what they meet
        raise BadImage(f"it begins like a {kind} image, but cannot be read: {error}.") from error
    lines.append(f"{len(data):,} bytes. What it shows is not in this text.")
    return "\n".join(lines)


def _words(image: Any) -> list[str]:
    if image.format == "PNG" and image.width * image.height <= _MOST_PIXELS:
        # What stands behind the pixels is found by reading them; a picture that was cut off keeps
        # the words before them.
        with suppress(OSError, SyntaxError, ValueError):
            image.load()
    texts = dict(image.info)
    comment = texts.get("comment")
    if isinstance(comment, bytes):
        texts["comment"] = comment.decode("utf-8", errors="replace")
    lines = [
        f"{str(name)[:80]}: {text[:_MOST_WORDS]}"
        for name, text in texts.items()
        if isinstance(text, str)
    ]
    return lines[:_MOST_TEXTS]


def _taken(image: Any) -> list[str]:
    try:
        return list(_exif(image))[:_MOST_FACTS]
    except Exception:  # noqa: BLE001 - the other facts of a strange file are shown all the same
        return []


def _exif(image: Any) -> Iterator[str]:
    from PIL import ExifTags

    exif = image.getexif()
    fields: dict[str, object] = {}
    for names, facts in (
        (ExifTags.TAGS, exif),
        (ExifTags.TAGS, exif.get_ifd(ExifTags.IFD.Exif)),
        (ExifTags.GPSTAGS, exif.get_ifd(ExifTags.IFD.GPSInfo)),
    ):
        fields |= {names.get(key, str(key)): value for key, value in facts.items()}
    for name, value in fields.items():
        if isinstance(value, str | int | float | tuple) or hasattr(value, "numerator"):
            yield f"{name}: {str(value)[:_MOST_VALUE]}"
