"""A server for the clients of this room."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.api import Api, running_api

from envserver.proxy.gate import Gate


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@pytest.fixture
async def api(tmp_path: Path, gate: Gate) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db", gate=gate) as running:
        yield running
