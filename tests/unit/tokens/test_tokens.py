"""Any forest of calls becomes rows in which each sampled token is trained exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from envserver_records.records import Call, Sequence, pack, unpack
from envserver_records.sampling import SamplingSpan
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.forests import (
    ACTIONS,
    answers,
    call,
    calls_of,
    calm,
    comb,
    conversations,
    forests,
    reference_rows,
    spans,
    tokens,
)

from envserver.tokens import DEFAULT, Actions, build, builder, check, chosen
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
    calls = calls_of(
        ([1], [2, 3], raw), ([1, 2, 3, 4], [5], raw), ([1, 2, 3, 4, 5, 6], [7, 8], warmer)
    )
    (row,) = build(calls())
    assert row.sampling == [
        SamplingSpan(1, 5, 0.7, "raw"),
        SamplingSpan(6, 8, 1.3, "processed", ("top_p",)),
    ]
    assert unpack(pack(row), Sequence).sampling == row.sampling


def rows_of(calls: list[Call]) -> Counter[bytes]:
    """The rows as a multiset, without the numbers of the calls."""
    numbered = [replace(call, index=index) for index, call in enumerate(calls)]
    return Counter(
        pack([row.tokens, row.mask, row.logprobs, row.versions, row.agent])
        for row in build(numbered)
    )


@calm
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), tokens()), max_size=5), st.data()
)
def test_independent_calls_may_come_in_any_order(
    exchanges: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    # Distinct first tokens make them independent of each other.
    calls = [call(i, [100 + i, *prompt], sampled) for i, (prompt, sampled) in enumerate(exchanges)]
    assert rows_of(calls) == rows_of(data.draw(st.permutations(calls)))


@calm
@given(forests(), st.data())
def test_agents_that_work_side_by_side_do_not_change_each_others_rows(
    calls: list[Call], data: st.DataObject
) -> None:
    lineages = [(call.agent, call.model) for call in calls]
    queues = {each: iter([c for c in calls if (c.agent, c.model) == each]) for each in lineages}
    shuffled = [next(queues[each]) for each in data.draw(st.permutations(lineages))]
    assert rows_of(calls) == rows_of(shuffled)


UNDELIVERED = {"flags": ["undelivered_completion"]}
MIXED = ["mixed_versions"]
TWO_VERSIONS = (([1], [2], spans(3)), ([1, 2, 5], [6, 7], spans(4, 4)))


@pytest.mark.parametrize(
    ("calls", "actions", "rows"),
    [
        pytest.param(
            calls_of(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])),
            DEFAULT,
            [
                {
                    "tokens": [1, 2, 3, 4, 5, 6],
                    "mask": [0, 0, 1, 1, 0, 1],
                    "calls": [-1, -1, 0, 0, -1, 1],
                    "versions": [-1, -1, 0, 0, -1, 0],
                    "logprobs": [0, 0, -0.125, -0.25, 0, -1.125],
                    "path": [0, 1],
                }
            ],
            id="a conversation is one row",
        ),
        pytest.param(
            calls_of(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 9], [5])),
            DEFAULT,
            [
                {"mask": [0, 1, 0, 1]},
                {"tokens": [1, 2, 9, 5], "mask": [0, 0, 0, 1], "calls": [-1, 0, -1, 2]},
            ],
            id="a changed history is a second row, shared turns are trained once",
        ),
        pytest.param(
            calls_of(([1], [2]), ([1], [2])),
            DEFAULT,
            [{"mask": [0, 1]}, {"mask": [0, 1]}],
            id="equal samples stay two",
        ),
        pytest.param(
            calls_of(([1], [2], UNDELIVERED), ([1, 2], [3])),
            DEFAULT,
            [{"mask": [0, 0, 1]}],
            id="an undelivered answer is context only",
        ),
        pytest.param(
            calls_of(*TWO_VERSIONS),
            DEFAULT,
            [{"versions": [-1, 3, -1, 4, 4], "mask": [0, 1, 0, 1, 1], "flags": MIXED}],
            id="a row over several versions says so",
        ),
        pytest.param(
            calls_of(*TWO_VERSIONS, ([1, 2, 8], [9], spans(3))),
            chosen(mask=["mixed_versions"]),
            [
                {
                    "mask": [0, 0, 0, 1, 1],
                    "logprobs": [0, 0, 0, -1.125, -1.25],
                    "calls": [-1, 0, -1, 1, 1],
                    "flags": MIXED,
                },
                # What the first row gave up is not trained elsewhere.
                {"mask": [0, 0, 0, 1], "flags": []},
            ],
            id="older versions are context where mixing is masked",
        ),
    ],
)
def test_what_becomes_rows(
    calls: Callable[[], list[Call]], actions: Actions, rows: list[dict[str, Any]]
) -> None:
    built = build(calls(), actions)
    for row, columns in zip(built, rows, strict=True):
        assert {name: np.array(getattr(row, name)).tolist() for name in columns} == columns
    flags = sorted({flag for row in built for flag in row.flags})
    assert all_flags(calls(), built) == flags


class Zeros:
    def integers(self, low: int, high: int, size: int, dtype: type) -> np.ndarray:
        return np.zeros(size, dtype)


def test_prefixes_that_look_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # The worst luck: every prefix has the sum of every other.
    calls = calls_of(([1], [2]), ([1, 2, 3], [4]), ([1, 9], [3]), ([1, 2], [5]))()
    right = pack(build(calls))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Zeros())
    assert pack(build(calls)) == right


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
