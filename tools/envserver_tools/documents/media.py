"""Describes audio and video files as text: length, format, tags."""

from __future__ import annotations

import io

_WORDS = (
    *("title", "artist", "album", "albumartist", "composer", "genre", "year", "track", "disc"),
    "comment",
)
_MOST_WORDS = 1000
_MOST_EXTRA = 30


def kind_of(data: bytes) -> str:
    """ "mp3", "wav", "flac", "ogg", "aiff", "mp4" (also video and m4a), "wma" or ""."""
    marks = {b"ID3": "mp3", b"fLaC": "flac", b"OggS": "ogg", b"\x30\x26\xb2\x75\x8e\x66": "wma"}
    found = next((kind for mark, kind in marks.items() if data.startswith(mark)), "")
    if found:
        return found
    if data[:2] in (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2", b"\xff\xe3"):
        return "mp3"
    inner = {b"RIFFWAVE": "wav", b"FORMAIFF": "aiff", b"FORMAIFC": "aiff"}
    return inner.get(data[:4] + data[8:12], "mp4" if data[4:8] == b"ftyp" else "")


KINDS = ("mp3", "wav", "flac", "ogg", "aiff", "mp4", "wma")


def facts(data: bytes, kind: str) -> str:
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
