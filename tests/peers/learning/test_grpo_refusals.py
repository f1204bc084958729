"""The trainer's loop with batches that it must not learn from: it says why, and ends or goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import envserver_clients.grpo as grpo
import numpy as np
import pytest
import torch
from envserver_clients.records import Batch, ClientGroup, Row
from envserver_clients.training.guard import MismatchError
from envserver_clients.training.policy import Policy
from envserver_clients.training.settings import TrainerSettings
from rich.console import Console
from support.tiny_model import main as make_tiny

torch.set_num_threads(1)


class Source:
    """Leases batches one after the other; an acknowledged one never comes again."""

    def __init__(self, batches: list[Batch]) -> None:
        self.waiting = batches

    def resume(self, saved: object) -> None:
        return

    def batches(self) -> Iterator[Batch]:
        while self.waiting:
            yield self.waiting[0]

    def done(self, batch: Batch, checkpoint: str | None) -> None:
        assert self.waiting.pop(0) is batch


class Publisher:
    """Publishes to nobody."""

    def __init__(self, *_: object) -> None:
        return

    def __enter__(self) -> Any:
        return SimpleNamespace(
            first_version=lambda saved: saved, publish=lambda version, examples=(): None
        )

    def __exit__(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder)
    return folder


def batch(policy: Policy, number: int, noise: float) -> Batch:
    """A group of four rows whose delivered logprobs have noise of 0 to `noise` nats."""
    rng = np.random.default_rng(number)
    rows = []
    for trajectory in range(4):
        tokens = rng.integers(10, 4000, 24).astype(np.int32)
        mask = np.r_[[0] * 4, [1] * 20].astype(np.uint8)
        own = np.array([0.0, *policy.prompt_logprobs(tokens.tolist())])
        rows.append(
            Row(
                tokens=tokens,
                mask=mask,
                logprobs=((own - rng.uniform(0, noise, 24)) * mask).astype(np.float32),
                reward=float(trajectory == 0),
                group_id=f"g{number}",
                versions=np.where(mask, np.int32(0), np.int32(-1)),
                trajectory=trajectory,
            )
        )
    group = ClientGroup(f"g{number}", "e", "group", 0, memoryview(b""))
    group.__dict__["rows"] = rows
    return Batch(f"lease-{number}", 0.0, [group])


@pytest.fixture
def train(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the trainer on batches; it continues where it was."""

    def run(batches: list[Batch], **more: object) -> list[dict[str, Any]]:
        monkeypatch.setattr(grpo, "open_source", lambda *_: (Source(batches), None))
        monkeypatch.setattr(grpo, "Publisher", Publisher)
        settings = TrainerSettings(
            model=str(model), output=tmp_path, threads=1, max_staleness=None, **more
        )
        grpo.train(settings, Console(file=io.StringIO()))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def test_noise_on_the_logprobs_ends_the_run_with_the_reason(
    model: Path, tmp_path: Path, train: Any
) -> None:
    policy = Policy(str(model))
    spoiled = [batch(policy, number, 2.0) for number in range(4)]
    with pytest.raises(MismatchError, match=r"differ .* nats per token") as raised:
        train(spoiled, steps=8)
    assert "model" in raised.value.hint
    assert len(spoiled) == 1  # three were acknowledged: they cannot stop it again
    state = torch.load(tmp_path / "checkpoints" / "step-3" / "state.pt", weights_only=False)
    for name, value in policy.state().items():
        assert torch.equal(state["weights"][name], value)
    lines = train([batch(policy, 5, 0.0)], steps=4)
    assert [line.get("skipped") for line in lines] == ["mismatch"] * 3 + [None]
    assert lines[-1]["mismatch_mean"] < 1e-4


@pytest.mark.parametrize("logprob", [-9999.0, float("-inf"), float("nan")])
def test_an_extreme_logprob_costs_its_row_and_nothing_else(
    model: Path, tmp_path: Path, train: Any, logprob: float
) -> None:
    policy = Policy(str(model))
    batches = [batch(policy, number, 0.0) for number in range(2)]
    logprobs = batches[0].groups[0].rows[1].logprobs
    assert logprobs is not None
    logprobs[10] = logprob
    lines = train(batches, steps=2, objective="gspo")
    recorded = json.loads((tmp_path / "settings.json").read_text())
    assert (recorded["objective"], recorded["ratio_level"]) == ("gspo", "sequence")
    assert [line["rows_refused"] for line in lines] == [1, 0]
    assert [line["rows_learned"] for line in lines] == [3, 4]
    assert not any("skipped" in line for line in lines)
