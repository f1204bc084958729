"""What SkyRL gets for its batch of tasks. Against SkyRL itself: `test_adapters_real.py`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from envserver_clients.adapters.completions import completions_of
from envserver_clients.adapters.skyrl import output_of, task_groups_of
from envserver_records.records import Score, Trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.trajectories import sequence, trajectories, trajectory

from envserver import InputError

LISTS = ("prompt_token_ids", "response_ids", "loss_masks", "stop_reasons", "rollout_logprobs")


def identities(count: int) -> list[Any]:
    return [SimpleNamespace(instance_id=str(n // 2), repetition_id=n % 2) for n in range(count)]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=4), st.booleans())
def test_rows_stand_in_the_order_of_the_input(made: list[Trajectory], step_wise: bool) -> None:
    names = identities(len(made))
    output = output_of(made, names, step_wise=step_wise)
    rows = [completions_of(one) for one in made]
    counts = [len(one) if step_wise else 1 for one in rows]
    assert output["trajectory_ids"] == [
        name for name, count in zip(names, counts, strict=True) for _ in range(count)
    ]
    for name in LISTS:
        assert len(output[name]) == len(output["rewards"]) == sum(counts)
    for response, mask, logprobs in zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True
    ):
        assert len(response) == len(mask) == len(logprobs)
        assert all(
            trained or logprob == 0.0 for logprob, trained in zip(logprobs, mask, strict=True)
        )
    if not step_wise:
        assert output["rewards"] == [one.score.reward for one in made]
        assert output["is_last_step"] is None
        return
    assert output["response_ids"] == [row.completion_ids for one in rows for row in one]
    last = output["is_last_step"]
    assert last is not None
    assert [place + 1 for place, ends in enumerate(last) if ends] == [*itertools.accumulate(counts)]
    rewards = [sum(row) for row in output["rewards"] if isinstance(row, list)]
    assert [reward for reward, ends in zip(rewards, last, strict=True) if ends] == [
        one.score.reward for one in made
    ]
    assert not any(reward for reward, ends in zip(rewards, last, strict=True) if not ends)


def test_the_reward_is_on_the_last_token_of_the_last_step() -> None:
    forked = trajectory("r", sequence([1, 2, 3], [0, 1, 1]), sequence([1, 4, 5], [0, 1, 1]))
    output = output_of([forked], None, step_wise=True)
    assert output["rewards"] == [[0.0, 0.0], [0.0, 0.5]]
    assert output["is_last_step"] == [False, True]
    cut = trajectory("r", sequence([1, 2], [0, 1]), truncated=True)
    output = output_of([cut], None, step_wise=False)
    assert (output["loss_masks"], output["rewards"], output["stop_reasons"]) == (
        [[0]],
        [0.5],
        ["length"],
    )


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 2)), max_size=8
    )
)
def test_each_row_is_asked_for_once(rows: list[tuple[str, str, int]]) -> None:
    batch = {
        "prompts": [[] for _ in rows],
        "env_classes": [environment for environment, _, _ in rows],
        "env_extras": [{"task_id": task} for _, task, _ in rows],
        "trajectory_ids": [
            SimpleNamespace(instance_id=str(instance), repetition_id=0) for _, _, instance in rows
        ],
    }
    places = []
    for asked in task_groups_of(batch, "train"):
        for task_id, found in zip(asked.wish.task_ids, asked.places, strict=True):
            assert len(found) == asked.wish.group_size
            assert {rows[place][:2] for place in found} == {(asked.wish.environment, task_id)}
            assert len({rows[place] for place in found}) == 1
            places += found
    assert sorted(places) == [*range(len(rows))]


def test_rows_without_a_task_and_rollouts_without_a_reward_are_refused() -> None:
    batch = {"prompts": [[]], "env_classes": ["math"], "env_extras": [{}], "trajectory_ids": None}
    with pytest.raises(InputError, match="no task_id in env_extras"):
        task_groups_of(batch, None)
    unscored = trajectory("r", sequence([1, 2], [0, 1]), score=Score(reward=None))
    with pytest.raises(InputError, match="has no reward"):
        output_of([unscored], None, step_wise=False)
