"""Images of conversations: their bytes by content, and where their tokens are in a row.

The engine expands one placeholder of the chat template to as many tokens as its processor makes of
the image. A row has the expanded tokens; a span says which of them stand for which image. Bytes are
kept once, by their SHA-256.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """An image in a prompt or a row.

    Args:
        sha256: of its bytes, in hex.
        offset: position of its first token.
        length: number of its tokens.
        grid: what the engine's processor said of its patches: Qwen-VL's `image_grid_thw` (time,
            height and width in patches); empty: it said nothing.
    """

    sha256: str
    offset: int
    length: int
    grid: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.offset + self.length


class RowImage(msgspec.Struct, frozen=True):
    """An image of a training row, with its bytes (a file: PNG, JPEG, ...). Fields as ImageSpan."""

    sha256: str
    offset: int
    length: int
    data: bytes
    grid: tuple[int, ...] = ()


def sha256_of(data: bytes) -> str:
    """Returns the name under which `data` are kept."""
    return hashlib.sha256(data).hexdigest()


def images_of(spans: list[ImageSpan], held: dict[str, bytes], size: int) -> list[RowImage]:
    """Returns the images of a row, in the order of their tokens.

    Args:
        size: number of tokens of the row.
    """
    at = 0
    for span in spans:
        if span.offset < at or span.length < 1 or span.end > size:
            raise ValueError(
                f"image {span.sha256[:12]} has {span.length} tokens at {span.offset}: they are not "
                f"within the row of {size} tokens after those of the image before"
            )
        at = span.end
    for name in {span.sha256 for span in spans}:
        if name not in held or sha256_of(held[name]) != name:
            raise ValueError(f"the bytes of image {name[:12]} are missing or damaged")
    return [
        RowImage(span.sha256, span.offset, span.length, held[span.sha256], span.grid)
        for span in spans
    ]


def told_images(column: Any, row: int, held: dict[str, bytes], size: int) -> list[RowImage]:
    """Returns the images of a row as JSON tells them: a list for each row, of spans as objects."""
    try:
        spans = [ImageSpan(**one) for one in column[row]]
        found = [msgspec.convert(msgspec.to_builtins(one), ImageSpan) for one in spans]
    except (TypeError, LookupError, msgspec.ValidationError) as error:
        raise ValueError(f"the images of row {row} cannot be read: {error}") from error
    return images_of(found, held, size)
