"""Pictures to count in: what they show is what is asked for, and only the count is paid."""

from __future__ import annotations

import base64
import itertools
import struct
import zlib
from collections import Counter
from pathlib import Path

import pytest
from envserver_environments.visual_counting.drawing import COLOURS
from envserver_environments.visual_counting.env import VisualCounting
from support.commands import envserver, read_jsonl

Pixel = tuple[int, int, int]
NAMES = {colour: name for name, colour in COLOURS.items()}


def pixels(picture: bytes) -> list[list[Pixel]]:
    """Decodes a PNG whose lines are stored without a filter."""
    width, height = struct.unpack(">II", picture[16:24])
    begin = picture.index(b"IDAT") + 4
    (size,) = struct.unpack(">I", picture[begin - 8 : begin - 4])
    data = zlib.decompress(picture[begin : begin + size])
    lines = [data[at + 1 : at + 1 + 3 * width] for at in range(0, len(data), 3 * width + 1)]
    assert len(lines) == height
    return [[(*line[at : at + 3],) for at in range(0, len(line), 3)] for line in lines]  # type: ignore[misc]


def seen(picture: list[list[Pixel]], cell: int) -> Counter[tuple[str, str]]:
    """Counts shapes by colour and kind, told apart by how much of their box they fill."""
    found: Counter[tuple[str, str]] = Counter()
    corners = range(0, len(picture), cell)
    for top, left in itertools.product(corners, corners):
        inside = [line[left : left + cell] for line in picture[top : top + cell]]
        drawn = [
            (x, y) for y, line in enumerate(inside) for x, dot in enumerate(line) if dot in NAMES
        ]
        if drawn:
            x, y = drawn[0]
            wide, high = (max(at) - min(at) + 1 for at in zip(*drawn, strict=True))
            filled = len(drawn) / (wide * high)
            kind = "square" if filled > 0.95 else "circle" if filled > 0.65 else "triangle"
            found[NAMES[inside[y][x]], kind] += 1
    return found


@pytest.mark.parametrize("settings", [{}, {"grid": 6, "cell": 16, "most": 9}])
def test_the_count_is_what_the_picture_shows(settings: dict[str, int]) -> None:
    environment = VisualCounting(VisualCounting.Config(**settings))
    counts = Counter[int]()
    for task in itertools.islice(environment.tasks("train"), 60):
        _, _, colour, kind, *_ = task.public["question"].split()
        shapes = seen(pixels(base64.b64decode(task.public["picture"])), environment.config.cell)
        assert shapes[colour, kind.removesuffix("s")] == task.hidden["count"]
        counts[task.hidden["count"]] += 1
    assert set(counts) == set(range(1, environment.config.most + 1))


def test_tokens_about_an_image_that_cannot_be_placed_are_not_trained(tmp_path: Path) -> None:
    """The simulated engine does not say which tokens stand for the image."""
    words = ["--env.total_steps", 1, "--env.group_size", 2, "--sim.solve_probability", 1]
    words += ["--env.ensure_scores_are_not_same", "false", "--out", "out.jsonl"]
    command = ["process", "--env", "visual_counting", "--model", "sim", *words]
    made = envserver(*command, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    (group,) = read_jsonl(tmp_path / "out.jsonl")
    assert group["scores"] == [1.0, 1.0]
    assert {mask for row in group["masks"] for mask in row} <= {-100}
    assert all("images_unplaced" in one["flags"] for one in group["envserver"]["rollouts"])
