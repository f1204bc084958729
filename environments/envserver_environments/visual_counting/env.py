"""The environment `visual_counting`: how many red circles are in the picture? `public` holds a
picture (PNG in base64) of its own and a question. The answer is the last line, `Answer: N`."""

from __future__ import annotations

import base64
import random
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import Field

from envserver import (
    Environment,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

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
    rng: random.Random, grid: int, cell: int, count: int, look: tuple[str, str]
) -> list[Shape]:
    """Returns `count` shapes of the colour and kind `look`, and others, each in a cell of its own
    of `cell` pixels a side, 12 at least."""
    cells = [(column, row) for column in range(grid) for row in range(grid)]
    others = [(colour, kind) for colour in COLOURS for kind in KINDS if (colour, kind) != look]
    more = rng.randint(0, len(cells) - count)
    looks = [look] * count + [rng.choice(others) for _ in range(more)]
    shapes = []
    for (colour, kind), (column, row) in zip(looks, rng.sample(cells, len(looks)), strict=True):
        size = rng.randint(cell // 2, cell - 2)
        left, top = rng.randint(0, cell - size), rng.randint(0, cell - size)
        shapes.append(Shape(colour, kind, column, row, left, top, size))
    return shapes


def png(shapes: list[Shape], grid: int, cell: int) -> bytes:
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


_ANSWER = re.compile(r"answer:[ \t]*([0-9]{1,2})[ \t]*", re.IGNORECASE)
_SIZES = {"train": 20_000, "validation": 500, "test": 1_000}


class VisualCounting(Environment):
    """Count shapes of one colour and kind among others, in drawn pictures."""

    name = "visual_counting"

    class Config(Environment.Config):
        """Says what is drawn."""

        most: int = Field(default=6, ge=1, le=9)
        """Largest count; counts from 1 on are equally frequent."""
        grid: int = Field(default=4, ge=3, le=8)
        """Cells a side; each holds one shape at most."""
        cell: int = Field(default=28, ge=12, le=64)
        """Pixels a side of each cell."""

    def tasks(self, split: Split) -> Iterator[Task]:
        config = self.config
        for number in range(_SIZES[split]):
            rng = random.Random(f"visual-counting-{config.seed}-{split}-{number}")
            look = rng.choice([*COLOURS]), rng.choice(KINDS)
            count = rng.randint(1, config.most)
            drawn = png(scene(rng, config.grid, config.cell, count, look), config.grid, config.cell)
            question = f"How many {look[0]} {look[1]}s are in the picture?"
            public = {"question": question, "picture": base64.b64encode(drawn).decode()}
            yield Task(f"picture-{number}", public, {"count": count})

    async def rollout(self, task: PublicTask, run: Rollout) -> str:
        return (await run.chat([_asked(task)])).content

    def score(self, task: Task, result: Result) -> Score:
        return Score(reward=float(answer_of(result.output) == task.hidden["count"]))

    def demonstration(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": f"Answer: {task.hidden['count']}"}]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        count = task.hidden["count"]
        every = "\n".join(f"Answer: {number}" for number in range(10))
        right = f"Answer: {count}"
        yield KnownResult("the count", Result(output=right), least=1.0, most=1.0)
        wrong = {
            "one more": f"Answer: {count + 1}",
            "every count": every,
            "every count, then it": f"{every}\n{right}",
            "two counts in a line": f"{right} or {count + 1}",
            "the count, then more": f"{right}\nor not",
        }
        for name, output in wrong.items():
            yield KnownResult(name, Result(output=output))


def answer_of(output: Any) -> int | None:
    """Returns the count that the last line of an answer names; None if no or several lines do."""
    lines = (
        [line.strip() for line in output.strip().splitlines()] if isinstance(output, str) else []
    )
    found = [match for line in lines if (match := _ANSWER.match(line))]
    if len(found) != 1 or not _ANSWER.fullmatch(lines[-1]):
        return None
    return int(found[0][1])


def _asked(task: PublicTask) -> Message:
    url = f"data:image/png;base64,{task.public['picture']}"
    text = f"{task.public['question']} End with a line: Answer: N"
    picture = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [picture, {"type": "text", "text": text}]}
