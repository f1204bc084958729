"""What the overview calls a change: what differs beyond noise, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import orjson
import pytest
from support.browsers import DASHBOARD
from support.page_history import rows

from envserver.telemetry.history import curves

pytestmark = pytest.mark.thorough


def said_of(bad_minutes: int, folder: Path) -> list[list[str]]:
    """What is said of each hour of a day, the last first: "reward code bad"."""
    day = [(60.0 * minute, one) for minute, one in enumerate(rows(1440, bad_minutes))]
    script = folder / "changes.mjs"
    bundle = [
        DASHBOARD / "node_modules" / ".bin" / "rolldown",
        Path(__file__).with_name("changes.ts"),
    ]
    words = [*map(str, bundle), "--platform", "node", "-o", str(script)]
    subprocess.run(words, check=True, capture_output=True, cwd=DASHBOARD)
    series = orjson.dumps(curves(day, len(day), frozenset()))
    told = subprocess.run(["node", str(script)], input=series, check=True, capture_output=True)
    return [orjson.loads(line) for line in told.stdout.splitlines()]


@pytest.mark.usefixtures("_has_browser")
def test_a_day_of_noise_and_slow_progress_has_no_changes(tmp_path: Path) -> None:
    said = said_of(0, tmp_path)
    assert len(said) > 250
    assert [one for one in said if one] == []


@pytest.mark.usefixtures("_has_browser")
def test_a_fall_and_failures_are_changes(tmp_path: Path) -> None:
    assert {"reward code bad", "failures engine_unavailable bad"} <= set(said_of(6, tmp_path)[0])
