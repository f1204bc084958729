"""Backoff: growing pauses that stay below a maximum, spread by the caller's random number."""

from __future__ import annotations

import pytest
from envserver_records.backoff import Backoff
from hypothesis import given
from hypothesis import strategies as st


def test_pauses_double_up_to_the_maximum() -> None:
    backoff = Backoff(first_seconds=0.5, max_seconds=3.0)

    assert [backoff.seconds(failures) for failures in range(6)] == [0, 0.5, 1, 2, 3, 3]


@given(failures=st.integers(1, 10**9), draw=st.floats(0, 1))
def test_no_pause_leaves_its_bounds(failures: int, draw: float) -> None:
    backoff = Backoff(first_seconds=0.2, max_seconds=10.0, jitter=(0.5, 1.5))

    assert 0.1 <= backoff.seconds(failures, draw) <= 10.0


def test_the_random_number_spreads_a_pause() -> None:
    backoff = Backoff(first_seconds=4.0, jitter=(0.5, 1.0))

    assert [backoff.seconds(1, draw) for draw in (0.0, 0.5, 1.0)] == pytest.approx([2, 3, 4])
