"""Small videos, made by PyAV: a coloured circle whose colour changes every two seconds."""

import functools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {"red": (230, 30, 30), "green": (30, 180, 40), "blue": (30, 40, 230)}
"""In this order, and then again."""


@functools.cache
def picture(colour: str, width: int, height: int) -> Any:
    """A circle on white, and a black corner at the top left."""
    y, x = np.mgrid[:height, :width]
    shown = np.full((height, width, 3), 255, np.uint8)
    radius = min(width, height) // 3
    shown[(x - width // 2) ** 2 + (y - height // 2) ** 2 < radius**2] = COLOURS[colour]
    shown[: height // 8, : width // 8] = 0
    return shown


def film(
    path: Path,
    seconds: int = 6,
    *,
    rate: Fraction | int = 5,
    size: tuple[int, int] = (64, 48),
    codec: str = "mpeg4",
    keyframe_every: int = 10,
) -> Path:
    """Writes a video; its suffix says the container.

    Args:
        rate: frames a second.
        size: width and height in pixels.
        keyframe_every: frames from one that is whole to the next.
    """
    import av

    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = (
            *size,
            "yuv420p",
            keyframe_every,
        )
        for number in range(int(seconds * rate)):
            colour = [*COLOURS][int(number / rate / 2) % 3]
            frame: Any = av.VideoFrame.from_ndarray(picture(colour, *size), format="rgb24")
            frame.pts, frame.time_base = number, 1 / Fraction(rate)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path
