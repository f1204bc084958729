"""What is computed with torch, in one process of the Python that has it: loading it and what stands
on it takes as long as most of these tests.
"""

import os
import subprocess
from pathlib import Path

import pytest
from support.waiting import PATIENCE

FOLDER = Path(__file__).parent / "learning"


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_computed_with_torch(learn_python: Path, which: str) -> None:
    command = [learn_python, "-m", "pytest", "-q", "-m", which, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, FOLDER],
        cwd=FOLDER.parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
