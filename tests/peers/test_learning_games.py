"""Tiny models that toss coins in games: the reference trainer teaches Kuhn poker by self-play, and
a game of the real TextArena; trainers of others teach two agents, each by its own reward.
"""

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from envserver_environments.kuhn.game import exploitability, strategy_of
from support.backends import install
from support.foreign_trainers import SUPPORT, alone, house, printed, trainer
from support.learning import learning, mean

from envserver.export.stored import StoredGroup, read_groups

pytestmark = pytest.mark.slow
Tell = Callable[[str], None]

# Kuhn poker: what a perfect opponent wins gets less


def coin_tosser(python: Path, game: str, folder: Path, *more: object) -> Path:
    """A tiny model that plays a game as badly as chance; see support/coin_tosser.py."""
    printed(python, SUPPORT / "coin_tosser.py", game, folder, *more, env=alone())
    return folder


KUHN_WINDOW = 120
"""Groups of eight games each that one point of the curve is measured from."""


@pytest.fixture(scope="module")
def kuhn_player(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coin_tosser(learn_python, "kuhn", tmp_path_factory.mktemp("kuhn") / "tiny")


def curve(store: Path) -> list[float]:
    """The exploitability of the players, as they played in each window of groups."""
    games = [[one.output for one in group.rollouts] for group in read_groups([str(store)])]
    windows = [
        games[at : at + KUHN_WINDOW] for at in range(0, len(games) - KUHN_WINDOW + 1, KUHN_WINDOW)
    ]
    return [exploitability(strategy_of(chain.from_iterable(window))) for window in windows]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_self_play_comes_nearer_to_equilibrium(
    learn_python: Path, kuhn_player: Path, tmp_path: Path, tell: Tell, seed: int
) -> None:
    words = ("--task", "kuhn", "--seed", seed, "--steps", 70, "--minutes", 30)
    words = (*words, "--learning-rate", 1e-4, "--kl-weight", 0.1)
    with learning(learn_python, kuhn_player, tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    found = curve(run.output / "store.db")
    tell(f"kuhn, seed {seed}: exploitability " + " ".join(f"{one:.3f}" for one in found))
    assert found[0] > 0.25
    assert sum(found[-3:]) / 3 < found[0] / 2  # single windows go up and down


# A game of the real TextArena, without a line of glue: a settings file names it


GUESSING_WINDOW = 80
"""Groups of eight games that a share is measured from."""

GUESSING = """
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
    served.write_text(GUESSING)
    site = next(games_python.parents[1].glob("lib/python*/site-packages"))
    coin_tosser(learn_python, "guessing", model, site)
    words = ("--serve", served, "--steps", 60, "--minutes", 30)
    words = (*words, "--learning-rate", 4e-4)
    with learning(learn_python, model, tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    groups = list(read_groups([str(run.output / "store.db")]))
    before, after = foreign(groups[:GUESSING_WINDOW]), foreign(groups[-GUESSING_WINDOW:])
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


# In opposites.py the caller's reward says nothing about the caller until the answerer has learned.
# That rows have the rewards of their own agent, where those of two are opposed, is shown with
# duel.py in test_adapter_trl.py and test_atroposlib.py.


WINDOW = 16
"""Groups of eight rollouts that one point of a curve is the mean of."""
SERVED = (
    *("--env", SUPPORT / "opposites.py", "--env.group_size", 8, "--sampling.max_tokens", 4),
    *("--env.ensure_scores_are_not_same", "false"),  # so that curves are of all rollouts
)


@pytest.fixture(scope="module")
def opposites_player(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that says both words equally often, whatever it is asked."""
    return coin_tosser(learn_python, "opposites", tmp_path_factory.mktemp("opposites") / "tiny")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_trls_asynchronous_trainer_teaches_both(
    learn_python: Path, opposites_player: Path, tmp_path: Path, tell: Tell, seed: int
) -> None:
    words = (*SERVED, "--env.seed", seed)
    asked = (
        *("--environment", "opposites", "--asynchronous", 40),
        *("--batch", 64, "--rate", 3e-4, "--seed", seed),
    )
    with (
        house(learn_python, opposites_player, tmp_path, *words) as urls,
        trainer(
            "trl_trainers.py", learn_python, opposites_player, tmp_path, urls, *asked
        ) as process,
    ):
        assert process.end() == 0, process.output()[-5000:]
    both_have_learned(tmp_path / "groups.db", tell, f"TRL AsyncGRPOTrainer, seed {seed}")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_atroposlibs_example_trainer_teaches_both(
    learn_python: Path,
    example_trainer: Path,
    opposites_player: Path,
    tmp_path: Path,
    tell: Tell,
    seed: int,
) -> None:
    example_training(learn_python, example_trainer, opposites_player, tmp_path, seed)
    both_have_learned(tmp_path / "groups.db", tell, f"atroposlib's trainer, seed {seed}")


@pytest.fixture(scope="module")
def example_trainer(atropos_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but atroposlib's example trainer: it needs torch, which another Python
    has."""
    folder = tmp_path_factory.mktemp("atropos")
    found = "import importlib.util as u; print(u.find_spec('example_trainer').origin)"
    origin = printed(atropos_python, "-c", found, folder=folder)
    (folder / "example_trainer").symlink_to(Path(origin.strip()).parent)
    return folder


def example_training(python: Path, package: Path, model: Path, folder: Path, seed: int) -> None:
    """Runs 40 steps of atroposlib's trainer."""
    words = (*SERVED, "--env.seed", seed, "--rollouts.max_queued_groups", 4)
    asked = ("--steps", 40, "--batch", 64, "--rate", 1e-4, "--seed", seed)
    script = "atropos_peer/learner.py"
    with (
        house(python, model, folder, *words) as urls,
        trainer(script, python, model, folder, urls, *asked, packages=(package,)) as process,
    ):
        assert process.end() == 0, process.output()[-5000:]


def both_have_learned(store: Path, tell: Tell, name: str) -> None:
    """Each agent's mean reward is that of chance in the first games, and nearly 1 in the last."""
    groups = list(read_groups([str(store)]))
    windows = [groups[at : at + WINDOW] for at in range(0, len(groups) - WINDOW + 1, WINDOW)]
    for agent in ("caller", "answerer"):
        curve = [
            mean([rollout.rewards[agent] for group in window for rollout in group.rollouts])
            for window in windows
        ]
        tell(f"{name}: {agent} " + " ".join(f"{point:.2f}" for point in curve))
        assert curve[0] < 0.7  # chance is 0.5, give or take 0.04
        assert curve[-1] > 0.9
