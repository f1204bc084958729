"""Width and height of an image as its file declares them: a decoder takes memory for so many. Pure.

Nothing is decoded, and each file is read in few steps: a file of some bytes may declare gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

Read = Callable[[int, int], bytes]
"""Returns the bytes of a file from an offset on, so many at most."""
Size = tuple[int, int]

_MOST_STEPS = 10_000
"""Blocks of one file that are looked at, and parts of a GIF's block."""
_WINDOW = 1 << 16
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_TIFF_TYPES = {3: "H", 4: "I"}


def image_size(read: Read) -> Size | None:
    """Returns width and height of a PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC, or None."""
    head = read(0, 32)
    try:
        if head.startswith(b"\x89PNG"):
            return _pair(">II", head[16:24]) if head[12:16] == b"IHDR" else None
        if head.startswith(b"\xff\xd8"):
            return _of_jpeg(read)
        if head.startswith(b"GIF8"):
            return _of_gif(read, head)
        if head.startswith(b"RIFF"):
            return _of_webp(head)
        if head.startswith(b"BM"):
            if head[14:18] == b"\x0c\0\0\0":  # OS/2's
                return _pair("<HH", head[18:22])
            width, height = struct.unpack("<ii", head[18:26])
            return abs(width), abs(height)
        if head.startswith((b"II*\0", b"MM\0*")):
            return _of_tiff(read, "<" if head.startswith(b"I") else ">")
        return _of_boxes(read)
    except (struct.error, IndexError):
        return None


def _pair(form: str, data: bytes) -> Size:
    first, second = struct.unpack(form, data)
    return first, second


def _of_jpeg(read: Read) -> Size | None:
    at = 2
    for _ in range(_MOST_STEPS):
        mark, kind, length = struct.unpack(">BBH", read(at, 4))
        if mark != 0xFF:
            return None
        if kind == 0xFF:  # a fill byte
            at += 1
        elif kind in _JPEG_SIZES:
            height, width = struct.unpack(">HH", read(at + 5, 4))
            return width, height
        else:
            at += 2 + length
    return None


def _of_gif(read: Read, head: bytes) -> Size | None:
    """The larger of the screen and the first frame: a frame may be larger than its screen."""
    width, height, flags = struct.unpack("<HHB", head[6:11])
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    for _ in range(_MOST_STEPS):
        block = read(at, 10)
        if block[:1] == b",":
            left, top, wide, high = struct.unpack("<HHHH", block[1:9])
            return max(width, left + wide), max(height, top + high)
        if block[:1] != b"!":
            return None
        at = _after_parts(read, at + 2)
    return None


def _after_parts(read: Read, at: int) -> int:
    """Returns where a GIF's block ends whose parts begin at `at`."""
    for _ in range(_MOST_STEPS):
        length = read(at, 1)[0]
        at += 1 + length
        if not length:
            return at
    raise IndexError


def _of_webp(head: bytes) -> Size | None:
    kind = head[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        return width, height
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", head[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    return None


def _of_tiff(read: Read, order: str) -> Size | None:
    (at,) = struct.unpack(order + "I", read(4, 4))
    (count,) = struct.unpack(order + "H", read(at, 2))
    entries = read(at + 2, 12 * count)
    found: dict[int, int] = {}
    for tag, kind, _, raw in struct.iter_unpack(
        order + "HHI4s", entries[: len(entries) // 12 * 12]
    ):
        if tag in (_TIFF_WIDTH, _TIFF_HEIGHT) and kind in _TIFF_TYPES:
            (found[tag],) = struct.unpack_from(order + _TIFF_TYPES[kind], raw)
    if len(found) < 2:
        return None
    return found[_TIFF_WIDTH], found[_TIFF_HEIGHT]


def _of_boxes(read: Read) -> Size | None:
    """The largest that a box `ispe` names: an image may be put together from parts."""
    sizes: list[Size] = []
    at = 0
    while len(window := read(at, _WINDOW + 16)) > 16 and len(sizes) < _MOST_STEPS:
        place = window.find(b"ispe")
        while 0 <= place < _WINDOW and place + 16 <= len(window):
            sizes.append(_pair(">II", window[place + 8 : place + 16]))
            place = window.find(b"ispe", place + 4)
        at += _WINDOW
    return max(sizes, key=lambda size: size[0] * size[1], default=None)
