"""Rows and groups as a trainer leases them."""

from dataclasses import replace
from typing import Any

import numpy as np
from envserver_clients.records import ClientGroup, Row
from numpy.typing import ArrayLike


def row(
    tokens: ArrayLike,
    mask: ArrayLike,
    reward: float = 0.0,
    trajectory: int = 0,
    *,
    logprobs: ArrayLike = -0.5,
    version: int = 0,
    **more: Any,
) -> Row:
    """Its logprobs and its version are those of the trained tokens."""
    trained = np.asarray(mask, np.uint8)
    return Row(
        tokens=np.asarray(tokens, np.int32),
        mask=trained,
        logprobs=np.where(trained, logprobs, 0).astype(np.float32),
        reward=reward,
        group_id="g",
        versions=np.where(trained, np.int32(version), np.int32(-1)),
        trajectory=trajectory,
        **more,
    )


def group(*rows: Row, name: str = "g") -> ClientGroup:
    made = ClientGroup(name, "math", "group", 0, memoryview(b""))
    made.__dict__["rows"] = [replace(row, group_id=name) for row in rows]
    return made
