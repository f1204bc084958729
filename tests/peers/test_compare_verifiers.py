"""`make compare` drives both generations of verifiers: all turns, with the engine's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_both_generations_play_rollouts_of_five_turns(
    verifiers_classic_python: Path, verifiers_v1_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import compare_runs as runs

    monkeypatch.setattr(runs, "VERIFIERS", verifiers_classic_python)
    monkeypatch.setattr(runs, "VERIFIERS_V1", verifiers_v1_python)
    with runs.engine() as url:
        for how in (runs.by_verifiers, runs.by_verifiers_v1):
            ran = runs.play(how, url, 4, 5, 4)
            assert (ran.whole, ran.hung) == (4, False)
