"""`make compare` works: a small round in which the peers' parts are played by us, too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("peers", "turns"), [(1, (1,)), pytest.param(2, (1, 5), marks=pytest.mark.slow)]
)
def test_a_small_round_fills_the_table_the_page_and_the_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: int, turns: tuple[int, ...]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import compare
    import compare_runs as runs
    from api_load import ours

    for module, name, value in (
        (compare, "ROLLOUTS", dict.fromkeys(turns, (8, 16))),
        (compare, "verifiers", lambda: {f"verifiers {each}": runs.by_us for each in range(peers)}),
        (compare, "SINGLE", 8),
        (compare, "TOKENS", (16,)),
        (compare, "GROUPS", 4),
        (compare, "KILLED_ROLLOUTS", 16),
        (compare, "PEER_PYTHON", Path(sys.executable)),
        (compare, "theirs", ours),
        (runs, "VERIFIERS", Path(sys.executable)),
        (runs, "VERIFIERS_V1", Path(sys.executable)),
        (runs, "lost_by_atroposlib", runs.lost_by_us),
    ):
        monkeypatch.setattr(module, name, value)
    output = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["compare.py", "--rounds", "1", "--output", str(output)])
    assert compare.main() == 0

    page = output.read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    lost = {(row[0], row[3]): (row[2], row[4]) for row in rows if row[1] == "lost"}
    assert len(lost) == peers * (len(turns) + 1) + 1  # with each number of turns, and when killed
    assert set(lost.values()) == {("0", "0")}
    assert "0 runs hung" in page
    assert not re.search(r"\{\w+\}", page)
    plot = output.with_suffix(".svg").read_text()
    assert "a process for each agent" in plot
    assert "a call through a proxy" in plot
