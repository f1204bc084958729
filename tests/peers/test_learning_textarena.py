"""The reference trainer teaches a tiny model something of a game of the real TextArena, without a
line of glue: a settings file names the game."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.backends import install
from support.learning import ROOT, learning, mean, variables

from envserver.export.stored import StoredGroup, read_groups

Tell = Callable[[str], None]

WINDOW = 80
"""Groups of eight games that a share is measured from."""

SERVED = """
environment: textarena:GuessTheNumber-v0
env:
  options: {min_number: 1, max_number: 2, max_turns: 1}  # two guesses; the model knows three
  ensure_scores_are_not_same: false
  include_messages: false
sampling:
  max_tokens: 6
rollouts:
  max_concurrent: 64
  max_queued_groups: 12
  max_staleness_at_delivery: 1
workers:
  processes: 1
  rollouts_per_process: 64
"""


@pytest.mark.slow
def test_a_tiny_model_learns_which_numbers_there_are(
    learn_python: Path,
    games_python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tell: Tell,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    install(games_python, "games", "textarena:GuessTheNumber-v0")
    model, served = tmp_path / "tiny", tmp_path / "serve.yaml"
    served.write_text(SERVED)
    made = ROOT / "tests" / "support" / "guessing_model.py"
    site = next(games_python.parents[1].glob("lib/python*/site-packages"))
    subprocess.run([learn_python, made, model, site], check=True, env=variables())
    words = ("--serve", served, "--steps", 60, "--minutes", 30)
    words = (*words, "--learning-rate", 4e-4)
    with learning(learn_python, model, tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    groups = list(read_groups([str(run.output / "store.db")]))
    before, after = foreign(groups[:WINDOW]), foreign(groups[-WINDOW:])
    rewards = run.rewards()
    tell(
        f"GuessTheNumber: reward {mean(rewards[:5]):.2f} -> {mean(rewards[-5:]):.2f}, "
        f"foreign numbers {before:.2f} -> {after:.2f}"
    )
    assert before > 0.2
    assert after < before / 3
    assert mean(rewards[-5:]) > mean(rewards[:5])


def foreign(groups: list[StoredGroup]) -> float:
    """The share of games whose first guess is the number that the game does not have."""
    rollouts = [one for group in groups for one in group.rollouts]
    return mean([float(one.actions[0]["input"]["action"] == "[3]") for one in rollouts])
