"""What other trainers get of a rollout. Against verl and SkyRL: `test_adapters_real.py`."""

import asyncio
import dataclasses
import enum
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from envserver_clients.adapters import slime
from envserver_clients.adapters.completions import check_spans, completions_of
from envserver_clients.adapters.skyrl import EnvserverGenerator, output_of, task_groups_of
from envserver_clients.adapters.slime import publish, samples_of
from envserver_clients.adapters.trl_rollouts import rows_of
from envserver_clients.adapters.verl import EnvserverLoop, Rows, outputs_of
from envserver_clients.records import ClientGroup
from envserver_records.images import ImageSpan, sha256_of
from envserver_records.records import Json, Trajectory
from envserver_records.sampling import SamplingSpan
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.api import Api, native_group
from support.extent import examples
from support.trajectories import sequence, trajectories, trajectory
from support.weights_engine import saver, scripted_engine

from envserver import InputError, Score, TurnReward, pack
from envserver.formats.atropos import group_to_atropos
from envserver.proxy.gate import Gate

NOWHERE = "http://127.0.0.1:1"
LISTS = ("prompt_token_ids", "response_ids", "loss_masks", "stop_reasons", "rollout_logprobs")
many = settings(max_examples=examples(40), deadline=None)


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
    metadata: Json = field(default_factory=dict)

    Status = Status


# Rows keep their order, lengths, masks and rewards.


@many
@given(st.lists(trajectories(), min_size=1, max_size=4), st.booleans())
def test_skyrls_rows_stand_in_the_inputs_order(made: list[Trajectory], step_wise: bool) -> None:
    names: Any = [
        SimpleNamespace(instance_id=str(n // 2), repetition_id=n % 2) for n in range(len(made))
    ]
    output = output_of(made, names, step_wise=step_wise)
    rows = [completions_of(one) for one in made]
    counts = [len(one) if step_wise else 1 for one in rows]
    assert output["trajectory_ids"] == [
        name for name, count in zip(names, counts, strict=True) for _ in range(count)
    ]
    assert {len(output[name]) for name in (*LISTS, "rewards")} == {sum(counts)}
    for response, mask, logprobs in zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True
    ):
        assert len(response) == len(mask)
        told = zip(logprobs, mask, strict=True)
        assert all(trained or logprob == 0.0 for logprob, trained in told)
    rewards = [one.score.reward for one in made]
    last = output["is_last_step"]
    if not step_wise:
        assert (output["rewards"], last) == (rewards, None)
        return
    assert output["response_ids"] == [row.completion_ids for one in rows for row in one]
    assert last is not None
    ends = [*itertools.accumulate(counts)]
    assert [place + 1 for place, is_last in enumerate(last) if is_last] == ends
    sums = [sum(row) for row in output["rewards"] if isinstance(row, list)]
    assert [sums[end - 1] for end in ends] == rewards
    assert not any(one for one, is_last in zip(sums, last, strict=True) if not is_last)


@many
@given(trajectories())
def test_slimes_samples_are_rows(made: Trajectory) -> None:
    asked = Sample(group_index=4, index=9, prompt="1+1?", label="2", metadata={"task_id": "t"})
    before = dataclasses.replace(asked)
    samples = samples_of(made, asked)
    assert asked == before
    for sample, row in zip(samples, completions_of(made), strict=True):
        assert sample.tokens == row.prompt_ids + row.completion_ids
        assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
        assert sample.tokens[-sample.response_length :] == row.completion_ids
        assert (sample.loss_mask, sample.rollout_log_probs) == (row.mask, row.logprobs)
        assert sample.reward == made.score.reward
        assert (sample.index, sample.group_index, sample.label) == (9, 4, "2")
        cut = (sample.status is Status.TRUNCATED, sample.remove_sample)
        assert cut == (made.truncated, made.truncated)
    assert {sample.rollout_id for sample in samples} == ({9} if len(samples) > 1 else {None})


@many
@given(trajectories(), st.integers(1, 12), st.sampled_from(["one", "all"]))
def test_verls_lists_have_the_responses_length(made: Trajectory, length: int, rows: Rows) -> None:
    rowed = completions_of(made)
    outputs = outputs_of(made, rows, prompt_length=12, response_length=length)
    assert len(outputs) == (len(rowed) if rows == "all" else 1)
    for output in outputs:
        response, mask = output["response_ids"], output["response_mask"]
        asked = (output["prompt_ids"], response)
        row = next(one for one in rowed if (one.prompt_ids, one.completion_ids[:length]) == asked)
        assert len(response) == len(mask) == len(output["response_logprobs"]) <= length
        assert mask == ([0] * len(mask) if made.truncated else row.mask[:length])
        logprobs = zip(output["response_logprobs"], row.logprobs, mask, strict=False)
        assert all(given == (one if trained else 0.0) for given, one, trained in logprobs)
        assert output["reward_score"] == made.score.reward


# What a row says, by hand.


def test_a_sample_says_what_was_answered_and_by_which_weights() -> None:
    (sample,) = samples_of(trajectory("r", sequence([1, 2, 3, 4], [0, 1, 0, 1])), Sample())
    assert (sample.response, sample.weight_versions) == ("2", ["3"])
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0, 1], [-0.25, 0.0, -0.5])


def test_rewards_of_turns_are_at_the_ends_of_their_turns() -> None:
    row = sequence([1, 2, 3, 4, 5, 6], [0, 1, 1, 0, 1, 1])
    row.calls[:] = [-1, 0, 0, -1, 2, 2]
    turns = [TurnReward(0, 0.25, call=0), TurnReward(1, -0.5, call=2), TurnReward(1, 9.0, call=7)]
    made = trajectory("r", row, score=Score(reward=1.0, turns=turns))
    (one,) = outputs_of(made, "all", prompt_length=9, response_length=9)
    assert one["extra_fields"]["turn_scores"] == [0.25, -0.5]
    assert one["token_rewards"] == [0.0, 0.25, 0.0, 0.0, 0.75]  # the rest comes with the last
    assert sum(one["token_rewards"]) == one["reward_score"] == 1.0
    (cut,) = outputs_of(made, "all", prompt_length=9, response_length=3)
    assert cut["token_rewards"] == [0.0, 0.25, 0.75]
    (none,) = outputs_of(trajectory("r", row), "all", prompt_length=9, response_length=9)
    assert none["extra_fields"]["turn_scores"] == [] and "token_rewards" not in none
    asked = Sample(metadata={"task_id": "t"})
    (sample,) = samples_of(made, asked)
    assert sample.reward == 1.0
    assert sample.metadata["turn_rewards"] == [[1, 0.25], [4, -0.5]]
    assert asked.metadata == {"task_id": "t"}


def pictured() -> Trajectory:
    """A row whose tokens 1 and 2 are a picture, and 5 and 6 another one."""
    row = sequence([1, 9, 9, 2, 3, 9, 9, 4], [0, 0, 0, 0, 1, 0, 0, 1])
    made = trajectory("r", row)
    for offset, colour in ((1, "red"), (5, "blue")):
        file = io.BytesIO()
        Image.new("RGB", (3, 2), colour).save(file, "PNG")
        name = sha256_of(file.getvalue())
        made.images[name] = file.getvalue()
        row.images.append(ImageSpan(name, offset, 2))
    return made


def test_images_come_with_the_tokens_that_stand_for_them() -> None:
    (whole,) = outputs_of(pictured(), "one", prompt_length=9, response_length=9)
    images = whole["multi_modal_data"]["images"]
    assert [image.getpixel((0, 0)) for image in images] == [(255, 0, 0), (0, 0, 255)]
    assert whole["response_ids"] == [3, 9, 9, 4]
    (cut,) = outputs_of(pictured(), "one", prompt_length=9, response_length=2)
    assert cut["response_ids"] == [3] and len(cut["multi_modal_data"]["images"]) == 1
    lost = pictured()
    lost.images.popitem()
    with pytest.raises(InputError, match="missing or damaged"):
        outputs_of(lost, "one", prompt_length=9, response_length=9)


# What cannot be used is refused, with what to change.

LONG = trajectory("r", sequence([1, 2, 3], [0, 0, 1]))
UNSCORED = trajectory("r", sequence([1, 2], [0, 1]), score=Score(reward=None))
TASKLESS = {"prompts": [[]], "env_classes": ["m"], "env_extras": [{}], "trajectory_ids": None}


@pytest.mark.parametrize(
    ("use", "said"),
    [
        # Without its images a row would teach something else.
        (lambda: output_of([pictured()], None, step_wise=False), "SkyRL needs pixels"),
        (lambda: samples_of(pictured(), SimpleNamespace()), "slime gets tokens only"),
        (lambda: rows_of([pictured()]), "GRPOTrainer gets tokens only"),
        (
            lambda: outputs_of(LONG, "one", prompt_length=1, response_length=9),
            "2 tokens is longer than 1. Raise data.max_prompt_length",
        ),
        (lambda: output_of([UNSCORED], None, step_wise=False), "has no reward"),
        (lambda: task_groups_of(TASKLESS, None), "no task_id in env_extras"),
    ],
)
def test_what_a_trainer_cannot_use_is_refused(use: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError) as refused:
        use()
    assert said in f"{refused.value.message} {refused.value.hint}"


NAMED = {"task_id": "t", "environment": "math"}


def loop_of_verl(temperature: float) -> EnvserverLoop:
    lengths = SimpleNamespace(prompt_length=9, response_length=9, temperature=temperature)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=lengths))
    return EnvserverLoop(SimpleNamespace(config=config), url=NOWHERE, tools=None)


def slimes_args(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(envserver_url=NOWHERE, **more)


# Rows tell how they were sampled; adapters refuse what their trainer would get wrong.

WARM = SamplingSpan(2, 5, 0.7, "processed")


def group_body(form: str, *spans: SamplingSpan) -> bytes:
    made = native_group("g")
    for one in made.trajectories:
        for row in one.sequences:
            row.sampling = list(spans)
    told = group_to_atropos(made, include_messages=False)
    return pack(made) if form == "group" else json.dumps(told).encode()


@pytest.mark.parametrize("form", ["group", "atropos"])
def test_rows_say_how_they_were_sampled_over_both_wires(form: str) -> None:
    def sampling(*spans: SamplingSpan) -> list[list[SamplingSpan]]:
        body = memoryview(group_body(form, *spans))
        return [row.sampling for row in ClientGroup("g", "math", form, 7, body).rows]

    assert sampling(WARM) == [[WARM]] * 2
    plain = sampling(SamplingSpan(2, 5, 1.0, "raw"))[0]
    assert all(span.is_plain for span in plain) or form == "atropos"
    # A server of an older version gives the settings of all rollouts alone.
    assert sampling()[0] == [SamplingSpan(0, 5, 0.7)]


@pytest.mark.parametrize(
    ("changes", "temperature", "said"),
    [
        ({}, 1.0, "sampled at temperature 0.7, but the trainer divides by 1"),
        ({"logprobs": "raw"}, 0.7, "logprobs are from before it"),
        ({"altered": ("top_p", "min_p")}, None, "with top_p, min_p"),
    ],
)
def test_sampling_that_a_trainer_would_get_wrong_is_refused(
    changes: Json, temperature: float | None, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        check_spans([msgspec.structs.replace(WARM, **changes)], temperature, "x")
    check_spans([WARM], 0.7, "x")
    check_spans([SamplingSpan(2, 5, 1.0, "raw")], 1.0, "x")


async def test_adapters_compare_temperatures_with_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def complete(*_: object, **__: object) -> list[list[Trajectory]]:
        row = sequence([1, 2, 3], [0, 1, 1])
        row.sampling = [SamplingSpan(1, 3, 0.7, "processed")]
        return [[trajectory("r", row)]]

    for module in ("slime", "verl", "skyrl"):
        monkeypatch.setattr(f"envserver_clients.adapters.{module}.complete_groups", complete)
    with pytest.raises(InputError, match="divides by 1") as refused:
        await slime.generate(
            slimes_args(rollout_temperature=1.0), SimpleNamespace(metadata=NAMED), {}
        )
    assert "--rollout-temperature" in refused.value.hint
    with pytest.raises(InputError, match=r"divides by 1\.3"):
        await loop_of_verl(1.3).run({}, extra_info=NAMED)
    asked = {"prompts": ["p"], "env_classes": ["math"], "env_extras": [NAMED]}
    with pytest.raises(InputError, match="divides by 1"):
        await EnvserverGenerator(NOWHERE).generate(asked)
    right = EnvserverGenerator(NOWHERE, temperature=0.7)
    assert (await right.generate(asked))["response_ids"] == [[2, 3]]


async def test_a_checkpoint_of_slime_reaches_the_servers_engine(
    tmp_path: Path, api: Api, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "updates" / "weight_v000012"
    written.mkdir(parents=True)
    saver(12)(written)
    with scripted_engine() as engine:
        args = SimpleNamespace(envserver_url=api.url, envserver_engine_url=engine.url)
        for rank, weights in (("1", 0), ("0", 12)):
            monkeypatch.setenv("RANK", rank)
            await asyncio.to_thread(publish, args, str(written), [])
            assert engine.weights == weights
        assert engine.name == "version-12"
    assert (await api.get("/v1/policy"))["version"] == 12
    assert not gate.paused
