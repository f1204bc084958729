"""The server's share of work beside that of PyPI's atroposlib, measured on the same machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_api.py"


@pytest.mark.slow
def test_batches_leases_status_calls_and_memory_keep_their_budgets(
    atropos_python: Path, tmp_path: Path
) -> None:
    # CPU time of the servers: what else the machine does changes the ratios little.
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
