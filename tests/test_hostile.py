"""Hostile programs against the walls: what each holds, and what the weaker ones are known not to.

The programs stand in `hostile/`, and can be run by hand: see `hostile/driver.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
AS_ROOT = [sys.executable, "-m", "hostile.driver"]
AS_ORDINARY_USER = [
    *(sys.executable, "-m", "support.ordinary_user", "python", "-m", "hostile.driver"),
]
IS_ROOT = os.geteuid() == 0


def report(command: list[str], wall: str) -> dict[str, Any]:
    done = subprocess.run(
        [*command, wall],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def what_got_through(told: dict[str, Any]) -> str:
    verdicts = told["programs"] + told["controls"]
    bad = [verdict for verdict in verdicts if verdict["escapes"]]
    return "\n".join(f"{one['category']}: {one['name']}: {one['escapes']}" for one in bad)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(AS_ROOT, id="as root" if IS_ROOT else "as this user"),
        pytest.param(
            AS_ORDINARY_USER,
            id="as an ordinary user",
            marks=pytest.mark.skipif(not IS_ROOT, reason="this is an ordinary user already"),
        ),
    ],
)
def test_the_default_wall_holds_every_hostile_program_and_no_ordinary_one(
    command: list[str], tell: Callable[[str], None]
) -> None:
    told = report(command, "auto")
    assert what_got_through(told) == ""
    assert told["afterwards"] == []
    assert len(told["programs"]) > 130
    tell(
        f"{len(told['programs'])} hostile and {len(told['controls'])} ordinary programs against the"
        f" wall {told['wall']} as user {told['user']}: all as they must, {told['seconds']:.0f} s"
    )
