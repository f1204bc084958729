"""The room's house: a fake vLLM, a proxy before it, and clients."""

from collections.abc import AsyncIterator

import pytest
from support.proxy_house import House, house


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made
