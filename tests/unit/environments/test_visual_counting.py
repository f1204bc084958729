"""Pictures to count in: what they show is what is asked for, and only the count is paid."""

import base64
import io
import itertools
from collections import Counter

import pytest
from envserver_environments.visual_counting.env import COLOURS, VisualCounting
from PIL import Image, ImageOps

NAMES = {colour: name for name, colour in COLOURS.items()}


def seen(picture: bytes, cell: int) -> Counter[tuple[str, str]]:
    """Counts shapes by colour and kind, told apart by how much of their box they fill."""
    found: Counter[tuple[str, str]] = Counter()
    image = ImageOps.invert(Image.open(io.BytesIO(picture)))  # on black, which is no part of a box
    corners = range(0, image.width, cell)
    for top, left in itertools.product(corners, corners):
        inside = image.crop((left, top, left + cell, top + cell))
        if box := inside.getbbox():
            inside = inside.crop(box)
            (drawn, colour), *_ = [one for one in inside.getcolors() if any(one[1])]
            filled = drawn / (inside.width * inside.height)
            kind = "square" if filled > 0.95 else "circle" if filled > 0.65 else "triangle"
            found[NAMES[tuple(255 - part for part in colour)], kind] += 1
    return found


@pytest.mark.parametrize("settings", [{}, {"grid": 6, "cell": 16, "most": 9}])
def test_the_count_is_what_the_picture_shows(settings: dict[str, int]) -> None:
    environment = VisualCounting(VisualCounting.Config(**settings))
    counts = Counter[int]()
    for task in itertools.islice(environment.tasks("train"), 60):
        _, _, colour, kind, *_ = task.public["question"].split()
        shapes = seen(base64.b64decode(task.public["picture"]), environment.config.cell)
        assert shapes[colour, kind.removesuffix("s")] == task.hidden["count"]
        counts[task.hidden["count"]] += 1
    assert set(counts) == set(range(1, environment.config.most + 1))
