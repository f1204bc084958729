"""The reference trainer teaches a tiny model a game of the real TextArena, without a line of glue:
a settings file names the game."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.backends import install
from support.learning import ROOT, learning, mean, variables

Tell = Callable[[str], None]

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
def test_a_tiny_model_learns_to_use_hints(
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
    words = ("--serve", served, "--steps", 60, "--minutes", 30, "--until-reward", 0.98)
    words = (*words, "--learning-rate", 4e-4)
    with learning(learn_python, model, tmp_path / "run", *words) as run:
        assert run.process.end(2400) == 0, run.process.output()[-3000:]
    rewards = run.rewards()
    tell(f"GuessTheNumber: reward {mean(rewards[:5]):.2f} -> {mean(rewards[-5:]):.2f}")
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1
