"""Images in prompts: which a conversation has, and where the engine put their tokens.

A prompt is *folded* if each image is the one placeholder token that the chat template writes, and
*expanded* if it is what the model sees: as many tokens as the engine's processor makes of the
image. Continued prompts are sent folded, with the images beside them; rows are expanded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import msgspec
from envserver_records.images import ImageSpan, sha256_of
from envserver_records.records import Message, Trajectory

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
    """Returns width and height of a PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC, or None.

    Decodes nothing and reads in few steps, since a file of a few bytes may declare gigabytes.
    """
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
    """Returns the larger of the screen and the first frame, which may be larger than its screen."""
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
    """Returns the largest size in a box `ispe`: an image may be put together from parts."""
    sizes: list[Size] = []
    at = 0
    while len(window := read(at, _WINDOW + 16)) > 16 and len(sizes) < _MOST_STEPS:
        place = window.find(b"ispe")
        while 0 <= place < _WINDOW and place + 16 <= len(window):
            sizes.append(_pair(">II", window[place + 8 : place + 16]))
            place = window.find(b"ispe", place + 4)
        at += _WINDOW
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


Range = tuple[int, int]
"""Offset and length of an image's tokens."""

_REMEMBERED = 64 << 20
"""Characters of addresses whose facts are remembered."""
_LARGE = 1 << 18
"""Characters of new addresses above which they are read in a thread."""
_STEP = 1 << 18
"""Characters of base64 that are decoded at a time: other threads may run in between."""
_IMAGE_PARTS = ("image_url", "input_image", "image")
_TOKEN_FIELDS = ("image_token_id", "image_token_index")
_BANNED_FIELDS = (*_TOKEN_FIELDS, "video_token_id", "video_token_index", "audio_token_id")


def image_token_of(config: Mapping[str, Any]) -> int | None:
    found = [config[name] for name in _TOKEN_FIELDS if isinstance(config.get(name), int)]
    return found[0] if found else None


def banned_tokens_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the placeholders that must not be sampled: no medium is behind them."""
    found = {config[name] for name in _BANNED_FIELDS if isinstance(config.get(name), int)}
    size = (config.get("text_config") or config).get("vocab_size")
    return tuple(
        sorted(token_id for token_id in found if not isinstance(size, int) or token_id < size)
    )


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IMAGE_PARTS


def url_of(part: Mapping[str, Any]) -> str | None:
    held = part.get("image_url")
    url = held.get("url") if isinstance(held, dict) else held
    return url if isinstance(url, str) and url[:5].lower() == "data:" else None


def urls_of(messages: Iterable[Message]) -> list[str]:
    contents = [held for message in messages if isinstance(held := message.get("content"), list)]
    if not contents:
        return []
    parts = [part for content in contents for part in content if is_image(part)]
    return [url for part in parts if (url := url_of(part)) is not None]


class ImageFacts(NamedTuple):
    """Facts from the bytes of a `data:` address.

    `sha256`: in hex, of the address itself if it is not base64; `size`: as the file declares it.
    """

    sha256: str
    size: Size | None = None
    is_base64: bool = True


class _Remembered:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: OrderedDict[str, ImageFacts] = OrderedDict()
        self._characters = 0

    def get(self, url: str) -> ImageFacts | None:
        with self._lock:
            if (found := self._facts.get(url)) is not None:
                self._facts.move_to_end(url)
            return found

    def add(self, url: str, facts: ImageFacts) -> None:
        with self._lock:
            if self._facts.setdefault(url, facts) is facts:
                self._characters += len(url)
            while self._characters > _REMEMBERED and len(self._facts) > 1:
                self._characters -= len(self._facts.popitem(last=False)[0])


_remembered = _Remembered()


def bytes_of(url: str) -> bytes:
    """Returns the address's own bytes if it is not base64, so different images have two names."""
    try:
        return base64.b64decode(_base64_of(url), validate=True)
    except (binascii.Error, ValueError):
        return url.encode()


def url_from(data: bytes) -> str:
    """Returns a `data:` address; engines look at the bytes for the format."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def facts_of(url: str) -> ImageFacts:
    """Takes milliseconds for each megabyte of an address that is not among the last 64 MB."""
    facts = _remembered.get(url)
    if facts is None:
        facts = _facts(url)
        _remembered.add(url, facts)
    return facts


async def facts_of_all(
    urls: Sequence[str], reading: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[ImageFacts]:
    """Returns the facts of addresses, in a thread if they are large and new, within `reading`."""
    if not urls:
        return []

    def read() -> list[ImageFacts]:
        with reading():
            return [facts_of(url) for url in urls]

    new = sum(len(url) for url in urls if _remembered.get(url) is None)
    return await asyncio.to_thread(read) if new > _LARGE else read()


def digest_of(url: str) -> str:
    return facts_of(url).sha256


def _facts(url: str) -> ImageFacts:
    text = _base64_of(url)
    digest = hashlib.sha256()
    try:
        for at in range(0, len(text), _STEP):
            piece = base64.b64decode(text[at : at + _STEP], validate=True)
            if at + _STEP < len(text) and len(piece) != _STEP * 3 // 4:
                raise ValueError("padding before the end")
            digest.update(piece)
        return ImageFacts(digest.hexdigest(), image_size(lambda at, size: _part(text, at, size)))
    except (binascii.Error, ValueError):
        return ImageFacts(sha256_of(url.encode()), is_base64=False)


def _base64_of(url: str) -> str:
    text = url.partition(",")[2]
    return "".join(text.split()) if "\n" in text else text  # it may be in lines


def _part(text: str, at: int, size: int) -> bytes:
    first = at // 3
    held = base64.b64decode(text[first * 4 : -(-(at + size) // 3) * 4])
    return held[at - first * 3 : at - first * 3 + size]


def held_by(conversations: Iterable[Iterable[Message]]) -> dict[str, bytes]:
    """Returns the bytes of all images of some conversations, by their SHA-256."""
    held: dict[str, bytes] = {}
    for url in {url for messages in conversations for url in urls_of(messages)}:
        data = bytes_of(url)
        held[sha256_of(data)] = data
    return held


def shared(rollouts: Iterable[Trajectory]) -> tuple[list[Trajectory], dict[str, bytes]]:
    """Returns the rollouts without the bytes of their images, and these: each once."""
    bare: list[Trajectory] = []
    held: dict[str, bytes] = {}
    for rollout in rollouts:
        held |= rollout.images
        bare.append(msgspec.structs.replace(rollout, images={}) if rollout.images else rollout)
    return bare, held


def folded(ids: Sequence[int], ranges: Iterable[Range], token: int) -> list[int]:
    """Returns `ids` with one `token` in place of each range."""
    out: list[int] = []
    at = 0
    for offset, length in ranges:
        out += [*ids[at:offset], token]
        at = offset + length
    return [*out, *ids[at:]]


def folds_to(ids: Sequence[int], ranges: Sequence[Range], token: int) -> bool:
    """Returns whether every `token` of expanded `ids` is in a range, and each range has one."""
    at = 0
    for offset, length in ranges:
        if length < 1 or offset < at or offset + length > len(ids) or token in ids[at:offset]:
            return False
        if token not in ids[offset : offset + length]:
            return False
        at = offset + length
    return token not in ids[at:]


def placed(ids: Sequence[int], expanded: Sequence[int], token: int) -> list[Range] | None:
    """Finds where the images of a folded prompt are in the expanded one: a range for each `token`.

    None: the prompts differ in more than their images, or the ranges are not certain.
    """
    pieces = _split(ids, token)
    if len(expanded) < len(ids) or list(expanded[: len(pieces[0])]) != pieces[0]:
        return None
    tail = len(expanded) - len(pieces[-1])
    if len(pieces) > 1 and list(expanded[tail:]) != pieces[-1]:
        return None
    ranges: list[Range] = []
    at = len(pieces[0])
    for piece in pieces[1:-1]:
        found = _after(expanded, piece, at + 1, tail - 1, token)
        if found is None:
            return None
        ranges.append((at, found - at))
        at = found + len(piece)
    if len(pieces) > 1:
        ranges.append((at, tail - at))
    elif len(expanded) != len(ids):
        return None
    return ranges if folds_to(expanded, ranges, token) else None


def spans(
    digests: Sequence[str], ranges: Sequence[Range], grids: Sequence[tuple[int, ...]] = ()
) -> list[ImageSpan]:
    known = list(grids) if len(grids) == len(ranges) else [()] * len(ranges)
    return [
        ImageSpan(digest, offset, length, tuple(grid))
        for digest, (offset, length), grid in zip(digests, ranges, known, strict=True)
    ]


def images_before(images: Iterable[ImageSpan], end: int) -> list[tuple[str, int, int]]:
    """Returns what identifies the images that begin before position `end`."""
    return [(image.sha256, image.offset, image.length) for image in images if image.offset < end]


def _split(ids: Sequence[int], token: int) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for id in ids:
        if id == token:
            pieces.append([])
        else:
            pieces[-1].append(id)
    return pieces


def _after(
    expanded: Sequence[int], piece: list[int], start: int, end: int, token: int
) -> int | None:
    """Returns the only place in [start, end) where `piece` follows an image; None: it is not sure.

    A processor may write ordinary tokens into an image too (line breaks between its parts), so that
    a short piece can be in several places. The first is right if the image is a run of `token`.
    """
    if not piece:
        return None
    places = [
        at
        for at in range(start, end - len(piece) + 1)
        if expanded[at] == piece[0] and list(expanded[at : at + len(piece)]) == piece
    ]
    fit = [at for at in places if token in expanded[start - 1 : at]]
    if len(fit) > 1 and any(id != token for id in expanded[start - 1 : fit[0]]):
        return None
    return fit[0] if fit else None
