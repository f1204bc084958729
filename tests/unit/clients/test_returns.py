"""Rewards of turns and agents become returns, advantages and rewards of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from envserver_clients.adapters.skyrl import output_of
from envserver_clients.records import Row
from envserver_clients.training.advantages import rewards_of, row_advantages
from envserver_records.records import Score, Trajectory
from envserver_records.returns import Earned, advantages, turn_advantages
from envserver_records.scores import TurnReward, with_totals
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.trajectories import sequence, trajectory

VALUES = st.floats(-4, 4, width=16)


@st.composite
def earned(draw: st.DrawFn, *, turns: int | None = None, rewarded: bool = True) -> Earned:
    count = turns if turns is not None else draw(st.integers(1, 4))
    calls = list(range(0, 2 * count, 2))
    own = draw(st.dictionaries(st.sampled_from(calls), VALUES)) if rewarded else {}
    return Earned(draw(VALUES) + sum(own.values()), calls, own)


@given(earned(), st.floats(0, 1))
@settings(max_examples=examples(100), deadline=None)
def test_a_return_is_its_reward_and_the_discounted_rest(one: Earned, discount: float) -> None:
    assert one.returns()[0] == pytest.approx(one.reward)
    found = one.returns(discount)
    outcome = one.reward - sum(one.turn_rewards.values())
    rewards = [one.turn_rewards.get(call, 0.0) for call in one.turns]
    rewards[-1] += outcome
    for turn, value in enumerate(found):
        later = sum(discount**n * reward for n, reward in enumerate(rewards[turn:]))
        assert value == pytest.approx(later, abs=1e-6)


@given(st.lists(earned(rewarded=False), min_size=1, max_size=5), st.sampled_from(["std", "mean"]))
@settings(max_examples=examples(100), deadline=None)
def test_without_rewards_of_turns_each_turn_has_its_trajectorys_advantage(
    group: list[Earned], scaling: str
) -> None:
    whole = advantages([one.reward for one in group], scaling)  # type: ignore[arg-type]
    by_call = turn_advantages(group, scaling)  # type: ignore[arg-type]
    for one, found, value in zip(group, by_call, whole, strict=True):
        assert found == pytest.approx(dict.fromkeys(one.turns, float(value)), abs=1e-4)


@given(st.lists(earned(turns=3), min_size=2, max_size=5))
@settings(max_examples=examples(100), deadline=None)
def test_the_advantages_of_a_turn_add_up_to_nothing(group: list[Earned]) -> None:
    by_call = turn_advantages(group, "mean", 0.9)
    for call in group[0].turns:
        assert sum(found[call] for found in by_call) == pytest.approx(0, abs=1e-3)


def row(number: int, agent: str, reward: float, turns: dict[int, float]) -> Row:
    calls = np.array([-1, *turns], np.int32)
    length = len(calls)
    return Row(
        tokens=np.arange(length, dtype=np.int32),
        mask=(calls >= 0).astype(np.uint8),
        logprobs=np.zeros(length, np.float32),
        reward=reward,
        group_id="g",
        versions=np.zeros(length, np.int32),
        trajectory=number,
        agent=agent,
        calls=calls,
        turns=list(turns),
        turn_rewards={call: value for call, value in turns.items() if value},
    )


def test_the_baseline_is_the_agents_own() -> None:
    rows = [
        *(row(0, "one", 1.0, {0: 0.0}), row(0, "two", -1.0, {1: 0.0})),
        *(row(1, "one", 1.0, {0: 0.0}), row(1, "two", -3.0, {1: 0.0})),
    ]
    assert rewards_of(rows) == {("one", 0): 1, ("two", 0): -1, ("one", 1): 1, ("two", 1): -3}
    assert [found.value for found in row_advantages(rows, "mean")] == [0.0, 1.0, 0.0, -1.0]


def test_turns_learn_from_their_own_returns() -> None:
    """Both got 1 in all: one for its first turn, the other for its second."""
    rows = [row(0, "one", 1.0, {0: 1.0, 2: 0.0}), row(1, "one", 1.0, {1: 0.0, 3: 1.0})]
    assert [found.value for found in row_advantages(rows, "mean")] == [0.0, 0.0]
    first, second = row_advantages(rows, "mean", turn_discount=1.0)
    assert first.tokens is not None and first.tokens.tolist() == [0.0, 0.0, -0.5]
    assert second.tokens is not None and second.tokens.tolist() == [0.0, 0.0, 0.5]
    first, second = row_advantages(rows, "mean", turn_discount=0.0)
    assert first.tokens is not None and first.tokens.tolist() == [0.0, 0.5, -0.5]


def rolled(rewards: dict[int, float], outcome: float) -> Trajectory:
    """Two rows of two calls each; call 9 is in no row."""
    rows = [sequence([1, 2, 3, 4], [0, 1, 1, 1]) for _ in range(2)]
    for number, one in enumerate(rows):
        one.calls = np.array([-1, 2 * number, 2 * number, 2 * number + 1], np.int32)
    turns = [TurnReward(0, value, None, call) for call, value in rewards.items()]
    score = with_totals(Score(reward=outcome, turns=turns), {})
    return trajectory("r", *rows, score=score)


@given(st.dictionaries(st.sampled_from([0, 1, 2, 3, 9, -1]), VALUES), VALUES)
@settings(max_examples=examples(100), deadline=None)
def test_the_rewards_of_tokens_add_up_to_the_reward(
    rewards: dict[int, float], outcome: float
) -> None:
    made = rolled(rewards, outcome)
    told = output_of([made], None, step_wise=True)["rewards"]
    assert sum(map(sum, told)) == pytest.approx(made.score.reward, abs=1e-6)  # type: ignore[arg-type]
    assert told[0][1] == pytest.approx(rewards.get(0, 0.0))  # type: ignore[index]
    assert told[0][2] == pytest.approx(rewards.get(1, 0.0))  # type: ignore[index]
