"""Groups to put into stores."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from envserver_records.errors import StoreError, StoreLost

from envserver.store import GroupPut, GroupRow

from .waiting import PATIENCE


def group(group_id: str, body: bytes = b"body", **fields: Any) -> GroupPut:
    facts = {"env": "math", "format": "group", "size": 4, "tokens": 100, "max_length": 50}
    return GroupPut(group_id=group_id, body=body, **(facts | fields))


def noise(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size_bytes)


def ids(groups: Iterable[GroupRow]) -> list[str]:
    return [row.group_id for row in groups]


async def patiently(ask: Callable[[], Awaitable[Any]]) -> Any:
    """What it answers once the database is there again."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await ask()
            except StoreLost:
                raise
            except StoreError:
                await asyncio.sleep(0.1)
