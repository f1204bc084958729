"""A server with a store, and the clock by which it notices who is silent."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.api import Api, running_api
from support.clocks import Clock

from envserver.http.health import Metrics
from envserver.proxy.gate import Gate
from envserver.store import Store, open_store


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db", metrics=Metrics(), gate=Gate()) as served:
        yield served


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """After 30 seconds."""
    clock = Clock()
    monkeypatch.setattr("envserver.runners.runner.time", clock)
    return clock
