"""Groups to put into stores."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from envserver.store import GroupPut, GroupRow


def group(group_id: str, body: bytes = b"body", **fields: Any) -> GroupPut:
    facts = {"env": "math", "format": "group", "size": 4, "tokens": 100, "max_length": 50}
    return GroupPut(group_id=group_id, body=body, **(facts | fields))


def noise(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size_bytes)


def ids(groups: Iterable[GroupRow]) -> list[str]:
    return [row.group_id for row in groups]
