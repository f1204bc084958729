"""What slime gets of a rollout: its published `Sample`, filled."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from envserver_clients.adapters.completions import completions_of
from envserver_clients.adapters.slime import generate, publish, samples_of
from envserver_records.records import Trajectory
from hypothesis import given, settings
from support.api import running_api
from support.extent import examples
from support.trajectories import sequence, trajectories, trajectory
from support.weights_engine import saver, scripted_engine

from envserver import ConfigError, InputError, Score, TurnReward
from envserver.proxy import Gate


class Status(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """Fields of slime's own that a generate function reads or fills, as published."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    Status = Status


@settings(max_examples=examples(40), deadline=None)
@given(trajectories())
def test_samples_are_rows(made: Trajectory) -> None:
    asked = Sample(group_index=4, index=9, prompt="1+1?", label="2", metadata={"task_id": "t"})
    before = dataclasses.replace(asked)
    samples = samples_of(made, asked)
    assert asked == before
    rows = completions_of(made)
    for sample, row in zip(samples, rows, strict=True):
        assert sample.tokens == row.prompt_ids + row.completion_ids
        assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
        assert sample.tokens[-sample.response_length :] == row.completion_ids
        assert (sample.loss_mask, sample.rollout_log_probs) == (row.mask, row.logprobs)
        assert sample.reward == made.score.reward
        assert (sample.index, sample.group_index, sample.label) == (9, 4, "2")
        cut = (sample.status is Status.TRUNCATED, sample.remove_sample)
        assert cut == (made.truncated, made.truncated)
    assert {sample.rollout_id for sample in samples} == ({9} if len(samples) > 1 else {None})


def test_a_sample_says_what_was_answered_and_by_which_weights() -> None:
    (sample,) = samples_of(trajectory("r", sequence([1, 2, 3, 4], [0, 1, 0, 1])), Sample())
    assert (sample.response, sample.weight_versions) == ("2", ["3"])
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0, 1], [-0.25, 0.0, -0.5])


def test_rewards_of_turns_are_told_beside_the_reward() -> None:
    row = sequence([1, 2, 3, 4], [0, 1, 1, 1])
    row.calls[:] = [-1, 0, 0, 1]
    score = Score(reward=1.0, turns=[TurnReward(0, 0.25, call=0), TurnReward(1, 0.5, call=1)])
    asked = Sample(metadata={"task_id": "t"})
    (sample,) = samples_of(trajectory("r", row, score=score), asked)
    assert sample.reward == 1.0
    assert sample.metadata["turn_rewards"] == [[1, 0.25], [2, 0.5]]
    assert asked.metadata == {"task_id": "t"}


async def test_what_is_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENVSERVER_URL", raising=False)
    with pytest.raises(ConfigError, match="No server is configured"):
        await generate(SimpleNamespace(), Sample(), {})
    with pytest.raises(InputError, match="no environment in metadata"):
        args = SimpleNamespace(envserver_url="http://127.0.0.1:1")
        await generate(args, Sample(metadata={"task_id": "t"}), {})


async def test_a_checkpoint_of_slime_reaches_the_servers_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "updates" / "weight_v000012"
    written.mkdir(parents=True)
    saver(12)(written)
    gate = Gate()
    async with running_api(tmp_path / "s.db", gate=gate) as api:
        with scripted_engine() as engine:
            args = SimpleNamespace(envserver_url=api.url, envserver_engine_url=engine.url)
            monkeypatch.setenv("RANK", "1")
            await asyncio.to_thread(publish, args, str(written), [])
            assert engine.weights == 0
            monkeypatch.setenv("RANK", "0")
            await asyncio.to_thread(publish, args, str(written), [])
            assert (engine.weights, engine.name) == (12, "version-12")
        assert (await api.get("/v1/policy"))["version"] == 12
        assert not gate.paused
