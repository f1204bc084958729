"""SkyRL's own model sees the images that our adapter gives it (`make trainers`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.foreign_trainers import alone

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_skyrl_computes_our_logprobs_of_rows_with_images(
    trainers_python: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    words = [trainers_python, "-W", "ignore", "-m", "support.skyrl_images", tmp_path / "model"]
    environ = alone(ROOT / "clients", ROOT / "tools", ROOT / "tests")
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    tell(f"SkyRL's logprobs of rows with images are within {found['difference']:.1e} of ours")
    assert found["difference"] < 1e-5
    assert "needs pixels" in found["refused"][0]
