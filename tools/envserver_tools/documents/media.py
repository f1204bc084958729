"""Describes images, audio and video as text: format, size or length, embedded metadata."""

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
IMAGES: Final = (*dict.fromkeys(_MARKS.values()), "bmp", "webp")
_MOST_CHARACTERS: Final = 4000
_MOST_TEXTS: Final = 20
_MOST_FACTS: Final = 60
_MOST_VALUE: Final = 200
_MOST_PIXELS: Final = 50_000_000
"""Largest PNG whose pixels are read to find the words that stand behind them."""


class BadImage(Exception):
    """The file starts like an image but is not a valid one."""


def image_kind(data: bytes) -> str:
    """One of IMAGES, or "" for other data."""
    if data.startswith(b"BM") and len(data) > 26 and data[6:10] == b"\0\0\0\0":
        return "bmp"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for mark, kind in _MARKS.items() if data.startswith(mark)), "")


def image_facts(data: bytes) -> str:
    """Lines that describe the image. Raises BadImage: it cannot be read."""
    from PIL import Image

    kind = image_kind(data)
    Image.MAX_IMAGE_PIXELS = None  # its pixels are not shown: size is no danger here
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            lines = [
                f"A {kind.upper()} image, {image.width} x {image.height} pixels (width x height), "
                f"mode {image.mode}.",
                *_texts(image),
                *_taken(image),
            ]
    except Exception as error:  # Pillow has many: its parsers raise what they meet
        raise BadImage(f"it begins like a {kind} image, but cannot be read: {error}.") from error
    lines.append(f"{len(data):,} bytes. What it shows is not in this text.")
    return "\n".join(lines)


def _texts(image: Any) -> list[str]:
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
        f"{str(name)[:80]}: {text[:_MOST_CHARACTERS]}"
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


_WORDS = (
    *("title", "artist", "album", "albumartist", "composer", "genre", "year", "track", "disc"),
    "comment",
)
_MOST_WORDS = 1000
_MOST_EXTRA = 30


def sound_kind(data: bytes) -> str:
    """ "mp3", "wav", "flac", "ogg", "aiff", "mp4" (also video and m4a), "wma" or ""."""
    marks = {b"ID3": "mp3", b"fLaC": "flac", b"OggS": "ogg", b"\x30\x26\xb2\x75\x8e\x66": "wma"}
    found = next((kind for mark, kind in marks.items() if data.startswith(mark)), "")
    if found:
        return found
    if data[:2] in (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2", b"\xff\xe3"):
        return "mp3"
    inner = {b"RIFFWAVE": "wav", b"FORMAIFF": "aiff", b"FORMAIFC": "aiff"}
    return inner.get(data[:4] + data[8:12], "mp4" if data[4:8] == b"ftyp" else "")


SOUNDS: Final = ("mp3", "wav", "flac", "ogg", "aiff", "mp4", "wma")


def sound_facts(data: bytes, kind: str) -> str:
    """Lines that describe the file; the library's exceptions propagate."""
    from tinytag import TinyTag

    tag = TinyTag.get(file_obj=io.BytesIO(data))
    parts = [f"A {kind} file (sound or film) of {len(data):,} bytes"]
    if tag.duration:
        parts.append(f"{_clock(tag.duration)} long ({tag.duration:.2f} seconds)")
    for value, unit in ((tag.samplerate, "Hz"), (tag.bitdepth, "bits"), (tag.channels, "channels")):
        if value:
            parts.append(f"{value:,} {unit}")
    if tag.bitrate:
        parts.append(f"{tag.bitrate:.0f} kbit/s")
    facts = {name: getattr(tag, name, None) for name in _WORDS}
    facts |= dict(list(tag.other.items())[:_MOST_EXTRA])
    lines = [f"{name}: {_value(value)}" for name, value in facts.items() if value]
    return "\n".join([", ".join(parts) + ".", *lines, "What is heard in it is not in this text."])


def _value(value: object) -> str:
    words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]} ..."


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
