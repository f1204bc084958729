"""Empty places for stores, and groups to put into them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envserver.store import GroupPut, GroupRow

POSTGRES_URL = os.environ.get("ENVSERVER_TEST_POSTGRES_URL")
PLACES = ["sqlite"] if POSTGRES_URL is None else ["sqlite", "postgresql"]


async def empty_place(kind: str, folder: Path) -> str:
    """Where no store is yet: below `folder`, or the database of POSTGRES_URL, emptied."""
    if kind == "sqlite":
        return str(folder / "new folder" / "store.db")
    import asyncpg

    assert POSTGRES_URL is not None
    connection = await asyncpg.connect(POSTGRES_URL)
    await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await connection.close()
    return POSTGRES_URL


def group(group_id: str, body: bytes = b"body", **fields: Any) -> GroupPut:
    facts = {"env": "math", "format": "group", "size": 4, "tokens": 100, "max_length": 50}
    return GroupPut(group_id=group_id, body=body, **(facts | fields))


def noise(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size_bytes)


def ids(groups: Iterable[GroupRow]) -> list[str]:
    return [row.group_id for row in groups]
