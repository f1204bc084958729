"""Models that the tests of merging share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models_on_disk import weights, write_model


@pytest.fixture
def three(tmp_path: Path) -> dict[str, Path]:
    return {
        name: write_model(tmp_path / name, weights(seed))
        for seed, name in enumerate(("base", "sft", "rl"))
    }
