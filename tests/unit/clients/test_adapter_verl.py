"""What verl gets of a rollout. Against verl itself: `test_adapters_real.py`."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from envserver_clients.adapters.completions import completions_of
from envserver_clients.adapters.skyrl import output_of as skyrl_output
from envserver_clients.adapters.slime import samples_of
from envserver_clients.adapters.trl_rollouts import rows_of
from envserver_clients.adapters.verl import EnvserverLoop, Rows, outputs_of
from envserver_records.images import ImageSpan, sha256_of
from envserver_records.records import Trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.extent import examples
from support.trajectories import sequence, trajectories, trajectory

from envserver import InputError, Score, TurnReward

FORKED = trajectory("r", sequence([1, 2, 3], [0, 1, 0]), sequence([1, 4, 5, 6], [0, 1, 0, 1]))


@settings(max_examples=examples(40), deadline=None)
@given(trajectories(), st.integers(1, 12), st.sampled_from(["one", "all"]))
def test_every_list_has_the_length_of_the_response(
    made: Trajectory, length: int, rows: Rows
) -> None:
    rowed = completions_of(made)
    outputs = outputs_of(made, rows, prompt_length=12, response_length=length)
    assert len(outputs) == (len(rowed) if rows == "all" else 1)
    for output in outputs:
        response, mask = output["response_ids"], output["response_mask"]
        row = next(
            one
            for one in rowed
            if one.prompt_ids == output["prompt_ids"] and one.completion_ids[:length] == response
        )
        assert len(response) == len(mask) == len(output["response_logprobs"]) <= length
        assert mask == ([0] * len(mask) if made.truncated else row.mask[:length])
        logprobs = zip(output["response_logprobs"], row.logprobs, mask, strict=False)
        assert all(given == (one if trained else 0.0) for given, one, trained in logprobs)
        assert output["reward_score"] == made.score.reward


def test_a_forked_history_is_its_richest_row_or_all_rows() -> None:
    (one,) = outputs_of(FORKED, "one", prompt_length=9, response_length=9)
    assert (one["prompt_ids"], one["response_ids"]) == ([1], [4, 5, 6])
    assert one["response_mask"] == [1, 0, 1]
    assert one["response_logprobs"] == [-0.25, 0.0, -0.5]
    assert one["extra_fields"]["min_global_steps"] == 3
    rows = outputs_of(FORKED, "all", prompt_length=9, response_length=9)
    assert [row["response_ids"] for row in rows] == [[2], [4, 5, 6]]


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


def test_other_trainers_refuse_rows_with_images() -> None:
    """Without its images a row would teach something else."""
    with pytest.raises(InputError, match="SkyRL needs pixels"):
        skyrl_output([pictured()], None, step_wise=False)
    with pytest.raises(InputError, match="slime gets tokens only"):
        samples_of(pictured(), SimpleNamespace())
    with pytest.raises(InputError, match="GRPOTrainer gets tokens only"):
        rows_of([pictured()])


def test_a_prompt_that_is_too_long_is_not_cut() -> None:
    long = trajectory("r", sequence([1, 2, 3], [0, 0, 1]))
    with pytest.raises(InputError, match="2 tokens is longer than 1") as caught:
        outputs_of(long, "one", prompt_length=1, response_length=9)
    assert "max_prompt_length" in caught.value.hint


@pytest.mark.parametrize(
    ("row", "lacks"), [({}, "task_id"), ({"extra_info": {"task_id": "t"}}, "environment")]
)
async def test_a_row_that_names_no_task_is_told(row: dict[str, Any], lacks: str) -> None:
    lengths = SimpleNamespace(prompt_length=9, response_length=9)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=lengths))
    loop = EnvserverLoop(SimpleNamespace(config=config), url="http://127.0.0.1:1", tools=None)
    with pytest.raises(InputError, match=f"no {lacks} in extra_info"):
        await loop.run({}, **row)
