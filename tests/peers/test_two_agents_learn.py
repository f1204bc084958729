"""Trainers of others, unchanged, teach two agents, each by its own reward: TRL's asynchronous one,
and atroposlib's example trainer.

In opposites.py the caller's reward says nothing about the caller until the answerer has learned.
That rows have the rewards of their own agent, where those of two are opposed, is shown with duel.py
in test_adapter_trl.py and test_atroposlib.py.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.foreign_trainers import SUPPORT, alone, house, trainer
from support.learning import mean
from support.waiting import PATIENCE

from envserver.export.stored import read_groups

WINDOW = 16
"""Groups of eight rollouts that one point of a curve is the mean of."""
SERVED = (
    *("--env", SUPPORT / "opposites.py", "--env.group_size", 8, "--sampling.max_tokens", 4),
    *("--env.ensure_scores_are_not_same", "false"),  # so that curves are of all rollouts
)
Tell = Callable[[str], None]


@pytest.fixture(scope="module")
def coin_tosser(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that says both words equally often, whatever it is asked."""
    folder = tmp_path_factory.mktemp("opposites") / "tiny"
    program = [learn_python, SUPPORT / "opposites_model.py", folder]
    subprocess.run(program, check=True, env=alone(), capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_trls_asynchronous_trainer_teaches_both(
    learn_python: Path, coin_tosser: Path, tmp_path: Path, tell: Tell, seed: int
) -> None:
    words = (*SERVED, "--env.seed", seed)
    asked = (
        *("--environment", "opposites", "--asynchronous", 40),
        *("--batch", 64, "--rate", 3e-4, "--seed", seed),
    )
    with (
        house(learn_python, coin_tosser, tmp_path, *words) as urls,
        trainer("trl_trainers.py", learn_python, coin_tosser, tmp_path, urls, *asked) as process,
    ):
        assert process.end() == 0, process.output()[-5000:]
    both_have_learned(tmp_path / "groups.db", tell, f"TRL AsyncGRPOTrainer, seed {seed}")


@pytest.mark.slow
def test_atroposlibs_example_trainer_takes_steps_with_both(
    learn_python: Path, example_trainer: Path, coin_tosser: Path, tmp_path: Path
) -> None:
    training = example_training(learn_python, example_trainer, coin_tosser, tmp_path, 0, 2)
    with training as (url, said):
        assert httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()["policy_version"] == 2
    better, worse = re.findall(r"Advantages: \+(\d+) / -(\d+)", said)[0]
    assert int(better) > 0 < int(worse)
    # The engine's logprobs are its own, but for 16 bits.
    assert float(re.findall(r"GRPO: ratio=([\d.]+)", said)[0]) == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_atroposlibs_example_trainer_teaches_both(
    learn_python: Path,
    example_trainer: Path,
    coin_tosser: Path,
    tmp_path: Path,
    tell: Tell,
    seed: int,
) -> None:
    with example_training(learn_python, example_trainer, coin_tosser, tmp_path, seed, 40):
        pass
    both_have_learned(tmp_path / "groups.db", tell, f"atroposlib's trainer, seed {seed}")


@pytest.fixture(scope="module")
def example_trainer(atropos_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but atroposlib's example trainer: it needs torch, which another Python
    has."""
    folder = tmp_path_factory.mktemp("atropos")
    found = "import importlib.util as u; print(u.find_spec('example_trainer').origin)"
    origin = subprocess.check_output([atropos_python, "-c", found], text=True, cwd=folder)
    (folder / "example_trainer").symlink_to(Path(origin.strip()).parent)
    return folder


@contextlib.contextmanager
def example_training(
    python: Path, package: Path, model: Path, folder: Path, seed: int, steps: int
) -> Iterator[tuple[str, str]]:
    """The server after so many steps of atroposlib's trainer, and what the trainer said."""
    words = (*SERVED, "--env.seed", seed, "--rollouts.max_queued_groups", 4)
    asked = ("--steps", steps, "--batch", 64, "--rate", 1e-4, "--seed", seed)
    script = "atropos_peer/learner.py"
    with house(python, model, folder, *words) as urls:
        with trainer(script, python, model, folder, urls, *asked, packages=(package,)) as process:
            assert process.end() == 0, process.output()[-5000:]
        yield urls[0], process.output()


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
