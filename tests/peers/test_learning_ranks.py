"""The trainer in two processes of torchrun, with a real server and the local engine: a killed rank
costs nothing, and no batch is learned from twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from envserver_clients.http import SyncEnvClient
from support.commands import Running, running
from support.foreign_trainers import house
from support.learning import Learning, tiny_model

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


def kill(process: Running, rank: int) -> None:
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
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tiny_model(learn_python)
    with house(learn_python, model, tmp_path, *SERVED) as urls:
        with ranks(learn_python, model, tmp_path, urls, restarts, 5) as run:
            for step in range(1, 1 + restarts):
                run.wait_for_step(step)
                kill(run.process, 1)  # torchrun starts both again
            run.wait_for_step(2 + restarts)
            kill(run.process, 0)  # once too often
            assert run.process.end() != 0
        # Both ways of new weights: files so far, over the network from now on.
        with ranks(learn_python, model, tmp_path, urls, 0, 5, "--weights", "gloo") as run:
            assert run.process.end() == 0, run.process.output()[-5000:]
        with SyncEnvClient(urls[0], run="judge") as client:
            acked = {one.group_id for one in client.list_groups(limit=1024) if one.state == "acked"}
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, 6))
    learned = list(chain.from_iterable(line["group_ids"] for line in lines))
    assert len(learned) == len(set(learned)) == 20
    assert acked == set(learned)
    assert max(float(line["mismatch_mean"]) for line in lines if "mismatch_mean" in line) < 0.05
    assert (run.output / "model" / "model.safetensors").exists()
    assert (run.output / "checkpoints" / "step-5" / "parts").is_dir()
