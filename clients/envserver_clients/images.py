"""Opens the images of rows as engines do. Needs Pillow."""

from __future__ import annotations

import io
from typing import Any

from envserver_records import InputError
from envserver_records.images import RowImage


def opened(image: RowImage) -> Any:
    """Returns an image as Pillow's, in RGB, as vLLM makes it: turned as its EXIF data say, on white
    where it is transparent.

    Raises:
        InputError: Pillow cannot read it.
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
