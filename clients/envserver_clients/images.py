"""Opens the images of rows as engines do, and makes pixels of them. Needs Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from envserver_records import InputError
from envserver_records.images import RowImage


def opened(image: RowImage) -> Any:
    """Returns an image as Pillow's, in RGB, as vLLM makes it: turned as its EXIF data say, on white
    where it is transparent.
    Raises InputError: Pillow cannot read it.
    """
    from PIL import Image, ImageOps

    try:
        read = ImageOps.exif_transpose(Image.open(io.BytesIO(image.data)))
        if not read.has_transparency_data:
            return read.convert("RGB")
        read = read.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"Image {image.sha256[:12]} of a row cannot be read: {error}", place="images"
        ) from error
    white = Image.new("RGB", read.size, (255, 255, 255))
    white.paste(read, mask=read.getchannel("A"))
    return white


def pixels(processor: Any, rows: Sequence[Sequence[RowImage]]) -> dict[str, Any]:
    """Returns what an image processor of transformers makes of the images of rows, as tensors:
    `pixel_values`, and `image_grid_thw` or `pixel_attention_mask` where the model has them.
    Raises InputError: an image cannot be read, or is not of a size that the processor takes.
    """
    shown = [[opened(image) for image in row] for row in rows]
    try:
        made = processor(images=shown, return_tensors="pt")
    except ValueError as error:
        raise InputError(f"Images of a row cannot be used: {error}", place="images") from error
    names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
    return {name: made[name] for name in names if name in made}
