"""`make compare` works: a small round in which the peers' parts are played by us, too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.thorough


def test_a_small_round_fills_the_table_the_page_and_the_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import compare
    import compare_runs as runs
    from api_peer import ours

    for module, name, value in (
        (compare, "ROLLOUTS", {1: (8, 16), 5: (8, 16)}),
        (compare, "SINGLE", 8),
        (compare, "TOKENS", (16,)),
        (compare, "GROUPS", 4),
        (compare, "KILLED_ROLLOUTS", 16),
        (compare, "PEER_PYTHON", Path(sys.executable)),
        (compare, "theirs", ours),
        (runs, "VERIFIERS", Path(sys.executable)),
        (runs, "VERIFIERS_V1", Path(sys.executable)),
        (runs, "by_verifiers", runs.by_us),
        (runs, "by_verifiers_v1", runs.by_us),
        (runs, "lost_by_atroposlib", runs.lost_by_us),
    ):
        monkeypatch.setattr(module, name, value)
    output = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["compare.py", "--rounds", "1", "--output", str(output)])
    assert compare.main() == 0

    page = output.read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    lost = {(row[0], row[3]): (row[2], row[4]) for row in rows if row[1] == "lost"}
    assert len(lost) == 7
    assert set(lost.values()) == {("0", "0")}
    assert "0 runs hung" in page
    assert not re.search(r"\{\w+\}", page)
    plot = output.with_suffix(".svg").read_text()
    assert "a process for each agent" in plot
    assert "a call through a proxy" in plot
