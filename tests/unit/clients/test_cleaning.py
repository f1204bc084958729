"""Whatever a rollout returns can be stored, sent and pickled once it is cleaned."""

from __future__ import annotations

import pickle
from typing import Any

import orjson
from envserver_records.cleaning import CUT, MAX_CHARACTERS, MAX_TEXT_CHARACTERS, clean
from hypothesis import given
from hypothesis import strategies as st

ANY_TEXT = st.text(st.characters(exclude_categories=[]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT,
    lambda part: st.lists(part) | st.dictionaries(ANY_TEXT, part),
)


@given(VALUES)
def test_a_cleaned_value_can_be_written(value: Any) -> None:
    written = orjson.dumps(clean(value).value)
    assert b"\\u0000" not in written
    assert clean(clean(value).value) == (clean(value).value, frozenset())


@given(
    st.recursive(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.lists
    )
)
def test_a_clean_value_stays(value: Any) -> None:
    assert clean(value) == (value, frozenset())


def test_halves_of_a_pair_are_joined_or_replaced() -> None:
    text = "\U0001f600 \ufffd \ufffd"
    assert clean("\ud83d\ude00 \ud83d \0") == (text, {"replaced"})


def test_depth_and_size_are_limited() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    pickle.dumps(clean(deep).value)
    orjson.dumps(clean(deep).value)
    assert clean("x" * 42_000_000) == ("x" * MAX_TEXT_CHARACTERS + CUT, {"cut"})
    many = clean({str(number): "x" * 1_000_000 for number in range(42)}).value
    assert sum(map(len, many.values())) <= MAX_CHARACTERS + 1000
    circular: list[Any] = []
    circular.append(circular)
    orjson.dumps(clean(circular).value)
