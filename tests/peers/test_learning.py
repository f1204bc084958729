"""The whole loop on this machine: tiny model, engine, server and trainer; the reward rises.

What counts is the reward on questions that training never asks; `make learn-proof` has five seeds.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
from envserver_clients.http import SyncEnvClient
from envserver_clients.records import GroupSummary
from support.commands import Running, free_port, running
from support.foreign_trainers import house
from support.learning import Learning, learning, mean, tiny_model

Tell = Callable[[str], None]

FEW = ("--task", "arithmetic")
"""A task of few questions, for what is not about generalising."""
SHORT = (*FEW, "--minutes", 30, "--steps")
TEN_MINUTES = (*FEW, "--minutes", 10, "--until-reward", 0.88)
PROOF = (
    *("--groups", 16, "--steps", 40, "--minutes", 30),
    *("--evaluate-every", 40, "--until-reward", 2),
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
    acked = {group.group_id for group in stored(run) if group.state == "acked"}
    assert acked == learned_once(run)


def learned_once(run: Learning) -> set[str]:
    """The groups of all steps, of which none is missing and none was made twice."""
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    learned = list(chain.from_iterable(line["group_ids"] for line in lines))
    assert len(learned) == len(set(learned))
    return set(learned)


@contextlib.contextmanager
def ended(python: Path, model: Path, folder: Path, *words: object) -> Iterator[Learning]:
    """A run; it must have come to its end when the block, which may disturb it, is over."""
    with learning(python, model, folder / "run", *words) as run:
        yield run
        assert run.process.end() == 0, run.process.output()[-3000:]


def whole_run(python: Path, model: Path, folder: Path, *words: object) -> Learning:
    """A run that nothing disturbs, after its end."""
    with ended(python, model, folder, *words) as run:
        pass
    return run


def test_learning_survives_a_killed_one(learn_python: Path, model: Path, tmp_path: Path) -> None:
    with ended(learn_python, model, tmp_path, *SHORT, 5) as run:
        run.wait_for_step(2)
        run.kill("trainer")
    assert (run.output / "curves.png").stat().st_size > 5000
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sort", "tool"])
def test_what_is_learned_generalises(
    learn_python: Path, model_of_many: Path, tmp_path: Path, tell: Tell, task: str
) -> None:
    words = ("--task", task, *PROOF)
    run = whole_run(learn_python, model_of_many, tmp_path, *words)
    start, *_, end = run.held_out()
    tell(f"{task}, held out: {start:.2f} -> {end:.2f}")
    assert start < 0.5
    assert end > start + 0.25
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("--wire", "atropos"), ("--lora-rank", 16, "--learning-rate", 2e-3)],
    ids=["the wire of atropos", "a LoRA"],
)
def test_others_learn_as_well(
    learn_python: Path, model: Path, tmp_path: Path, tell: Tell, words: tuple[object, ...]
) -> None:
    run = whole_run(learn_python, model, tmp_path, *words, *TEN_MINUTES)
    _has_learned(run, tell, f"arithmetic, {words[0]}")
    if "atropos" not in words:
        judge(run)


@pytest.mark.slow
def test_rewards_dealt_out_by_chance_teach_nothing(
    learn_python: Path, model_of_many: Path, tmp_path: Path, tell: Tell
) -> None:
    words = ("--task", "sort", "--shuffle-rewards", *PROOF)
    run = whole_run(learn_python, model_of_many, tmp_path, *words)
    start, *_, end = run.held_out()
    tell(f"by chance, held out: {start:.2f} -> {end:.2f}")
    assert end < start + 0.15


@pytest.mark.slow
def test_whatever_is_killed_learning_goes_on_from_the_checkpoint(
    learn_python: Path, model: Path, tmp_path: Path, tell: Tell
) -> None:
    victims = ["trainer", "engine", "server", "trainer", "server", "engine", "trainer"]
    words = (*FEW, "--steps", 80, "--minutes", 30)
    with ended(learn_python, model, tmp_path, *words) as run:
        for step, victim in zip(range(6, 80, 8), victims, strict=False):
            run.wait_for_step(step)
            run.kill(victim)
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


# Two processes of torchrun: a killed rank costs nothing, and no batch is learned from twice


ROOT = Path(__file__).parents[2]
SERVED = (
    *("--config", ROOT / "clients/envserver_clients/training/serve_arithmetic.yaml"),
    *("--rollouts.max_queued_groups", 4, "--env.group_size", 4),
)
TRAINER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts")


@contextlib.contextmanager
def ranks(
    python: Path,
    model: Path,
    folder: Path,
    urls: tuple[str, str],
    restarts: int,
    steps: int,
    *more: object,
) -> Iterator[Learning]:
    """Two ranks that torchrun starts, and starts again when one dies."""
    command = (*TRAINER, restarts, "-m", "envserver_clients.grpo", "--model", model, "--packed")
    command += ("--server", urls[0], "--engine", urls[1], "--output", folder / "out")
    command += ("--steps", steps, "--groups", 4, "--learning-rate", 1e-5, "--threads", 1, *more)
    with running(*command, folder=folder, program=python) as process:
        yield Learning(folder / "out", process)


def kill_rank(process: Running, rank: int) -> None:
    """kill -9 of one rank; torchrun's processes are its children, in order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = [
        int(child)
        for child in children
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    ]
    assert len(found) == 1
    os.kill(found[0], signal.SIGKILL)


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_loses_nothing_and_repeats_nothing(
    learn_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    model = tiny_model(learn_python)
    with house(learn_python, model, tmp_path, *SERVED) as urls:
        with ranks(learn_python, model, tmp_path, urls, restarts, 5) as run:
            for step in range(1, 1 + restarts):
                run.wait_for_step(step)
                kill_rank(run.process, 1)  # torchrun starts both again
            run.wait_for_step(2 + restarts)
            kill_rank(run.process, 0)  # once too often
            assert run.process.end() != 0
        # Both ways of new weights: files so far, over the network from now on.
        with ranks(learn_python, model, tmp_path, urls, 0, 5, "--weights", "gloo") as run:
            assert run.process.end() == 0, run.process.output()[-5000:]
        with SyncEnvClient(urls[0], run="judge") as client:
            acked = {one.group_id for one in client.list_groups(limit=1024) if one.state == "acked"}
    lines = run.lines()
    assert len(lines) == 5
    assert len(learned_once(run)) == 20
    assert acked == learned_once(run)
    assert max(float(line["mismatch_mean"]) for line in lines if "mismatch_mean" in line) < 0.05
    assert (run.output / "model" / "model.safetensors").exists()
    assert (run.output / "checkpoints" / "step-5" / "parts").is_dir()
