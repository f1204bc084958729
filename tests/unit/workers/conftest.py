"""A stand-in for the proxy."""

from collections.abc import AsyncIterator

import pytest_asyncio
from support.worker_standin import StandIn, serving


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def proxy() -> AsyncIterator[StandIn]:
    async with serving() as standin:
        yield standin
