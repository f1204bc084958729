"""Reward functions of PyPI's verifiers, unchanged, on rows: what they pay there, they pay here."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

from support.waiting import PATIENCE

SCRIPT = Path(__file__).parents[1] / "support" / "verifiers_rubrics.py"


def test_each_function_pays_what_it_pays_there(
    verifiers_classic_python: Path, tmp_path: Path
) -> None:
    run = subprocess.run(
        [verifiers_classic_python, "-W", "ignore", SCRIPT, sysconfig.get_path("purelib")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    told = json.loads(run.stdout.splitlines()[-1])
    for name, pairs in told.items():
        assert all(there == here for there, here in pairs), (name, pairs)
    assert [here for _, here in told["MathRubric"]] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert len({here for _, here in told["XMLParser"]}) > 2
