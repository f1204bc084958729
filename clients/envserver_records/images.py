"""Images of conversations: their bytes by content, and where their tokens are in a row.

The engine expands one placeholder of the chat template to as many tokens as its processor makes of
the image; a span says which tokens of a row stand for which image.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """An image in a prompt or a row: its SHA-256 in hex, its first token and their number.

    `grid`: what the engine's processor said of its patches, such as Qwen-VL's `image_grid_thw`
    (time, height and width in patches); empty: nothing.
    """

    sha256: str
    offset: int
    length: int
    grid: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.offset + self.length


class RowImage(msgspec.Struct, frozen=True):
    """An image of a training row, with its bytes (a file: PNG, JPEG, ...). Fields as ImageSpan."""

    sha256: str
    offset: int
    length: int
    data: bytes
    grid: tuple[int, ...] = ()


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def images_of(spans: list[ImageSpan], held: dict[str, bytes], size: int) -> list[RowImage]:
    """Returns the images of a row of `size` tokens, in the order of their tokens."""
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


def images_of_row(column: Any, row: int, held: dict[str, bytes], size: int) -> list[RowImage]:
    """Returns the images of a row in JSON: `column` has for each row a list of spans as objects."""
    try:
        spans = [ImageSpan(**span) for span in column[row]]
        found = [msgspec.convert(msgspec.to_builtins(span), ImageSpan) for span in spans]
    except (TypeError, LookupError, msgspec.ValidationError) as error:
        raise ValueError(f"the images of row {row} cannot be read: {error}") from error
    return images_of(found, held, size)
