"""Any forest of calls becomes rows in which each sampled token is trained exactly once."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from envserver_records.records import Call, Sequence, pack, unpack
from envserver_records.sampling import SamplingSpan
from hypothesis import given
from hypothesis import strategies as st
from support.forests import (
    ACTIONS,
    answers,
    calls_of,
    calm,
    comb,
    conversations,
    forests,
    reference_rows,
)

from envserver.tokens import Actions, build, builder, check
from envserver.tokens.builder import all_flags


@calm
@given(forests(), st.sampled_from(list(ACTIONS.values())))
def test_rows_are_those_of_the_definition_and_train_every_sampled_token_once(
    calls: list[Call], actions: Actions
) -> None:
    rows = build(calls, actions)
    check(calls, rows, actions)
    assert pack(rows) == pack(reference_rows(calls, actions))
    assert [pack(unpack(pack(row), Sequence)) for row in rows] == [pack(row) for row in rows]
    trained = sum(int(row.mask.sum()) for row in build(calls))
    assert trained == sum(len(c.completion_ids) for c in calls if c.exact and not c.flags)


def test_a_row_says_how_each_of_its_calls_was_sampled() -> None:
    """Three calls of one row: the first two alike, the third warmer and with top_p."""
    usual = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 9}
    raw = {"sampling": usual, "logprobs_kind": "raw"}
    warmer = {"sampling": {"temperature": 1.3, "top_p": 0.9}, "logprobs_kind": "processed"}
    calls = [[[1], [2, 3], raw], [[1, 2, 3, 4], [5], raw], [[1, 2, 3, 4, 5, 6], [7, 8], warmer]]
    (row,) = build(calls_of(calls))
    assert row.sampling == [
        SamplingSpan(1, 5, 0.7, "raw"),
        SamplingSpan(6, 8, 1.3, "processed", ("top_p",)),
    ]
    assert unpack(pack(row), Sequence).sampling == row.sampling


ROWS = tomllib.loads(Path(__file__).with_name("forests.toml").read_text())["rows"]


@pytest.mark.parametrize("name", ROWS)
def test_what_becomes_rows(name: str) -> None:
    calls, rows = calls_of(ROWS[name]["calls"]), ROWS[name]["rows"]
    built = build(calls, ACTIONS[ROWS[name]["actions"]])
    for row, columns in zip(built, rows, strict=True):
        assert {name: np.array(getattr(row, name)).tolist() for name in columns} == columns
    assert all_flags(calls, built) == sorted({flag for row in built for flag in row.flags})


@pytest.mark.parametrize(
    "calls",
    [
        conversations(200, 4000),
        conversations(50, 1000, side_by_side=8),
        comb(100, 2000),
        answers(300, 100),
        answers(300, 100, ends=200),
    ],
    ids=["conversation", "side by side", "comb", "samples of one prompt", "different ends"],
)
def test_a_prompt_is_compared_with_two_calls_at_most(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    compare = builder._continues
    monkeypatch.setattr(
        builder, "_continues", lambda prompt, call: compared.append(call) or compare(prompt, call)
    )
    builder.find_parents(calls)
    assert len(compared) < 2 * len(calls)
