"""`envserver evaluate`: estimates held against brute force, and reports of whole runs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.tau.evaluation import pass_hat_ks
from envserver import pass_at_k, pass_hat_k
from envserver.evaluation.estimators import estimate

outcomes = st.lists(st.booleans(), min_size=1, max_size=7)
shares = st.floats(0, 1, allow_nan=False)


@given(outcomes, st.data())
def test_estimates_of_k_attempts_are_the_shares_of_all_choices(
    passed: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(passed)))
    choices = list(itertools.combinations(passed, k))
    some = sum(map(any, choices)) / len(choices)
    every = sum(map(all, choices)) / len(choices)
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(some)
    assert pass_hat_k(len(passed), sum(passed), k) == pytest.approx(every)


@pytest.mark.parametrize("bad", [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1), (1, 1, 2)])
@pytest.mark.parametrize("estimator", [pass_at_k, pass_hat_k])
def test_estimates_of_what_cannot_be_are_refused(estimator, bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"less than k|cannot be"):
        estimator(*bad)


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=4), min_size=1, max_size=5))
def test_tau_counts_as_the_server_does(attempts: list[list[bool]]) -> None:
    rewards = {str(number): [float(one) for one in task] for number, task in enumerate(attempts)}
    for k, value in pass_hat_ks(rewards).items():
        single = [pass_hat_k(len(task), sum(task), k) for task in attempts]
        assert value == pytest.approx(estimate(single).value)


@settings(max_examples=30)
@given(st.lists(shares, min_size=2, max_size=40), st.integers(0, 3))
def test_an_interval_is_of_the_values_and_the_same_again(values: list[float], seed: int) -> None:
    found = estimate(values, seed=seed)
    assert found == estimate(values, seed=seed)
    assert found.low is not None and found.high is not None
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.value == pytest.approx(sum(values) / len(values))


def test_intervals_are_as_wide_as_the_normal_ones_of_many_tasks() -> None:
    found = estimate([0.0, 1.0] * 200)
    assert found.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.01)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.01)
    alone = estimate([1.0])
    assert (alone.value, alone.low, alone.high) == (1.0, None, None)
