"""Self-play at Kuhn poker, with the reference trainer: what a perfect opponent wins gets less."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from envserver_environments.kuhn.game import exploitability
from envserver_environments.kuhn.measure import strategy_of
from support.learning import ROOT, learning, variables

from envserver.export.stored import read_groups

Tell = Callable[[str], None]

WINDOW = 120
"""Groups of eight games each that one point of the curve is measured from."""


@pytest.fixture(scope="module")
def coin_tosser(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kuhn") / "tiny"
    making = ROOT / "tests" / "support" / "kuhn_model.py"
    subprocess.run([learn_python, making, folder], check=True, env=variables())
    return folder


def curve(store: Path) -> list[float]:
    """The exploitability of the players, as they played in each window of groups."""
    games = [[one.output for one in group.rollouts] for group in read_groups([str(store)])]
    windows = [games[at : at + WINDOW] for at in range(0, len(games) - WINDOW + 1, WINDOW)]
    return [exploitability(strategy_of(chain.from_iterable(window))) for window in windows]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_self_play_comes_nearer_to_equilibrium(
    learn_python: Path, coin_tosser: Path, tmp_path: Path, tell: Tell, seed: int
) -> None:
    words = ("--task", "kuhn", "--seed", seed, "--steps", 70, "--minutes", 30)
    words = (*words, "--learning-rate", 1e-4, "--kl-weight", 0.1)
    with learning(learn_python, coin_tosser, tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    found = curve(run.output / "store.db")
    tell(f"kuhn, seed {seed}: exploitability " + " ".join(f"{one:.3f}" for one in found))
    assert found[0] > 0.25
    assert sum(found[-3:]) / 3 < found[0] / 2  # single windows go up and down
