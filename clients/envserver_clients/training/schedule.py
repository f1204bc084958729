"""The learning rate of each update, without torch."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]
"""The learning rate after the warm-up: as it is, or falling to a least one in a line or in half a
cosine wave (arXiv 1608.03983, equation 5)."""


def rate_of(
    update: int, highest: float, warmup: int, schedule: Schedule, last: int, least: float
) -> float:
    """Returns the learning rate of an update.

    Args:
        update: its number, from 0.
        highest: the rate at the end of the warm-up, which rises in a line.
        warmup: number of updates with a rising rate.
        last: number of the update from which on the rate is `least`.
    """
    if update < warmup:
        return highest * (update + 1) / warmup
    done = min(1.0, (update - warmup) / max(1, last - warmup))
    match schedule:
        case "constant":
            return highest
        case "linear":
            left = 1 - done
        case "cosine":
            left = (1 + math.cos(math.pi * done)) / 2
    return least + (highest - least) * left
