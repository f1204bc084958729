"""Draws coloured shapes into a PNG without a library. Pure: the same scene gives the same bytes."""

from __future__ import annotations

import random
import struct
import zlib
from typing import NamedTuple

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
KINDS = ("circle", "square", "triangle")


class Shape(NamedTuple):
    """A shape in the cell (column, row) of the grid, moved and sized within it, in pixels."""

    colour: str
    kind: str
    column: int
    row: int
    left: int
    top: int
    size: int


def scene(
    rng: random.Random, grid: int, cell: int, count: int, asked: tuple[str, str]
) -> list[Shape]:
    """Returns `count` shapes that are asked for, and others: each in a cell of its own.

    Args:
        grid: cells a side; `cell`: pixels a side of each, 12 at least.
        asked: colour and kind.
    """
    cells = [(column, row) for column in range(grid) for row in range(grid)]
    others = [(colour, kind) for colour in COLOURS for kind in KINDS if (colour, kind) != asked]
    more = rng.randint(0, len(cells) - count)
    looks = [asked] * count + [rng.choice(others) for _ in range(more)]
    shapes = []
    for (colour, kind), (column, row) in zip(looks, rng.sample(cells, len(looks)), strict=True):
        size = rng.randint(cell // 2, cell - 2)
        left, top = rng.randint(0, cell - size), rng.randint(0, cell - size)
        shapes.append(Shape(colour, kind, column, row, left, top, size))
    return shapes


def png(shapes: list[Shape], grid: int, cell: int) -> bytes:
    """Returns the picture of `shapes`: RGB, `grid * cell` pixels a side, on white."""
    side = grid * cell
    pixels = bytearray(b"\xff" * (side * side * 3))
    for shape in shapes:
        colour = bytes(COLOURS[shape.colour])
        x, y = shape.column * cell + shape.left, shape.row * cell + shape.top
        for line in range(shape.size):
            begin, end = _span(shape.kind, line, shape.size)
            at = ((y + line) * side + x + begin) * 3
            pixels[at : at + (end - begin) * 3] = colour * (end - begin)
    lines = b"".join(b"\0" + pixels[row * side * 3 : (row + 1) * side * 3] for row in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = (b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in body)


def _span(kind: str, line: int, size: int) -> tuple[int, int]:
    """Returns the pixels [begin, end) of a line of a shape of `size` pixels a side."""
    if kind == "square":
        return 0, size
    middle = size / 2
    half = (line + 1) / 2 if kind == "triangle" else (middle**2 - (line + 0.5 - middle) ** 2) ** 0.5
    return max(0, round(middle - half)), min(size, round(middle + half))


def _chunk(kind: bytes, data: bytes) -> bytes:
    end = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + end
