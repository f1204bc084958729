"""The whole loop on this machine: tiny model, engine, server and trainer; the reward rises.

What counts is the reward on questions that training never asks; `make learn-proof` has five seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from envserver_clients.http import SyncEnvClient
from envserver_clients.records import GroupSummary
from support.commands import free_port, running
from support.learning import Learning, learning, mean, tiny_model

Tell = Callable[[str], None]

FEW = ("--task", "arithmetic")
"""A task of few questions, for what is not about generalising."""
SHORT = (*FEW, "--minutes", 30, "--steps")
TEN_MINUTES = (*FEW, "--minutes", 10, "--until-reward", 0.88)
PROOF = (
    "--groups",
    16,
    "--steps",
    40,
    "--minutes",
    30,
    "--evaluate-every",
    40,
    "--until-reward",
    2,
)


@pytest.fixture(scope="module")
def model(learn_python: Path) -> Path:
    return tiny_model(learn_python)


@pytest.fixture(scope="module")
def model_of_many(learn_python: Path) -> Path:
    return tiny_model(learn_python, "many")


def stored(run: Learning) -> list[GroupSummary]:
    """All groups in the store that the run left behind."""
    words = ("run-api", "--port", free_port(), "--store", run.output / "store.db")
    with running(*words, folder=run.output) as api:
        url = api.wait_for(r"http://127\.0\.0\.1:\d+")[0]
        with SyncEnvClient(url, run="judge") as client:
            found: list[GroupSummary] = []
            while page := client.list_groups(after=found[-1].seq if found else 0, limit=1024):
                found += page
            return found


def judge(run: Learning) -> None:
    """No batch was lost, none was learned from twice: not over all restarts."""
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    learned = list(chain.from_iterable(line["group_ids"] for line in lines))
    assert len(learned) == len(set(learned))
    acked = {group.group_id for group in stored(run) if group.state == "acked"}
    assert acked == set(learned)


def test_learning_goes_on_after_its_trainer_was_killed(
    learn_python: Path, model: Path, tmp_path: Path
) -> None:
    with learning(learn_python, model, tmp_path / "run", *SHORT, 5) as run:
        run.wait_for_step(2)
        run.kill("trainer")
        assert run.process.end() == 0, run.process.output()[-3000:]
    assert (run.output / "curves.png").stat().st_size > 5000
    judge(run)


@pytest.mark.slow
def test_a_model_learns_although_its_trainer_is_killed(
    learn_python: Path, model: Path, tmp_path: Path, tell: Tell
) -> None:
    with learning(learn_python, model, tmp_path / "run", *SHORT, 24) as run:
        run.wait_for_step(6)
        run.kill("trainer")
        assert run.process.end() == 0, run.process.output()[-3000:]
    rewards = run.rewards()
    tell(f"24 steps: reward {mean(rewards[:6]):.2f} -> {mean(rewards[-6:]):.2f}")
    assert mean(rewards[-6:]) > mean(rewards[:6]) + 0.1
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sort", "tool"])
def test_what_is_learned_generalises(
    learn_python: Path, model_of_many: Path, tmp_path: Path, tell: Tell, task: str
) -> None:
    words = ("--task", task, *PROOF)
    with learning(learn_python, model_of_many, tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    start, *_, end = run.held_out()
    tell(f"{task}, held out: {start:.2f} -> {end:.2f}")
    assert start < 0.5
    assert end > start + 0.25
    judge(run)


@pytest.mark.slow
def test_the_wire_of_atropos_teaches_as_well(
    learn_python: Path, model: Path, tmp_path: Path, tell: Tell
) -> None:
    words = ("--wire", "atropos", *TEN_MINUTES)
    with learning(learn_python, model, tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    _has_learned(run, tell, "arithmetic, atropos")


@pytest.mark.slow
def test_a_lora_learns_as_well(learn_python: Path, model: Path, tmp_path: Path, tell: Tell) -> None:
    words = ("--lora-rank", 16, "--learning-rate", 2e-3, *TEN_MINUTES)
    with learning(learn_python, model, tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    _has_learned(run, tell, "arithmetic, LoRA")
    judge(run)


@pytest.mark.slow
def test_rewards_dealt_out_by_chance_teach_nothing(
    learn_python: Path, model_of_many: Path, tmp_path: Path, tell: Tell
) -> None:
    words = ("--task", "sort", "--shuffle-rewards", *PROOF)
    with learning(learn_python, model_of_many, tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    start, *_, end = run.held_out()
    tell(f"by chance, held out: {start:.2f} -> {end:.2f}")
    assert end < start + 0.15


@pytest.mark.slow
def test_whatever_is_killed_learning_goes_on_from_the_checkpoint(
    learn_python: Path, model: Path, tmp_path: Path, tell: Tell
) -> None:
    victims = ["trainer", "engine", "server", "trainer", "server", "engine", "trainer"]
    words = (*FEW, "--steps", 80, "--minutes", 30)
    with learning(learn_python, model, tmp_path / "run", *words) as run:
        for step, victim in zip(range(6, 80, 8), victims, strict=False):
            run.wait_for_step(step)
            run.kill(victim)
        assert run.process.end() == 0, run.process.output()[-3000:]
    rewards = run.rewards()
    tell(f"seven kills: reward {mean(rewards[:10]):.2f} -> {mean(rewards[-10:]):.2f}")
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.2
    judge(run)


def _has_learned(run: Learning, tell: Tell, name: str) -> None:
    rewards = run.rewards()
    seconds = run.lines()[-1]["seconds"]
    tell(
        f"{name}: {mean(rewards[:5]):.2f} -> {mean(rewards[-10:]):.2f}, "
        f"{len(rewards)} steps, {seconds:.0f} s"
    )
    assert mean(rewards[:5]) < 0.3
    assert mean(rewards[-10:]) > 0.8
