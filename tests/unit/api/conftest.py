"""A running server over a store of its own, and tokens of each role."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
from support.api import Api, running_api

from envserver.http.access import Role, create_token


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db") as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of the tokens."""
    return tmp_path / "tokens.yaml"


@pytest.fixture
def tokens(path: Path) -> dict[str, str]:
    """A token of each role, in the file."""
    return {role: create_token(path, role, role)[0] for role in get_args(Role)}
