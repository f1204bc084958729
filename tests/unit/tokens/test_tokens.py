"""Any forest of calls becomes rows in which each sampled token is trained exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from envserver_records.records import Call, Sequence, VersionSpan, pack, unpack
from envserver_records.sampling import SamplingSpan
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.forests import (
    ACTIONS,
    answers,
    call,
    calm,
    comb,
    conversations,
    forests,
    reference_rows,
    tokens,
)

from envserver.tokens import Actions, build, builder, check, chosen
from envserver.tokens.builder import all_flags

actions = st.sampled_from(list(ACTIONS.values()))


@calm
@given(forests(), actions)
def test_rows_are_those_of_the_definition(calls: list[Call], actions: Actions) -> None:
    rows = build(calls, actions)
    check(calls, rows, actions)
    assert pack(rows) == pack(reference_rows(calls, actions))


@calm
@given(forests())
def test_every_sampled_token_is_trained_once(calls: list[Call]) -> None:
    trained = sum(int(row.mask.sum()) for row in build(calls))
    assert trained == sum(len(c.completion_ids) for c in calls if c.exact and not c.flags)


@calm
@given(forests())
def test_rows_survive_packing(calls: list[Call]) -> None:
    for row in build(calls):
        assert pack(unpack(pack(row), Sequence)) == pack(row)


def test_a_row_says_how_each_of_its_calls_was_sampled() -> None:
    """Three calls of one row: the first two alike, the third warmer and with top_p."""
    usual = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 9}
    calls = [
        call(0, [1], [2, 3], sampling=usual, logprobs_kind="raw"),
        call(1, [1, 2, 3, 4], [5], sampling=usual, logprobs_kind="raw"),
        call(
            2,
            [1, 2, 3, 4, 5, 6],
            [7, 8],
            sampling={"temperature": 1.3, "top_p": 0.9},
            logprobs_kind="processed",
        ),
    ]
    (row,) = build(calls)
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


def test_a_conversation_is_one_row() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6])]
    (row,) = build(calls)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert row.calls.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, 0]
    assert row.logprobs.tolist() == [0, 0, -0.125, -0.25, 0, -1.125]
    assert row.path == [0, 1]


def test_a_changed_history_is_a_second_row_and_shared_turns_are_trained_once() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 9], [5])]
    first, second = build(calls)
    assert first.mask.tolist() == [0, 1, 0, 1]
    assert second.tokens.tolist() == [1, 2, 9, 5]
    assert second.mask.tolist() == [0, 0, 0, 1]
    assert second.calls.tolist() == [-1, 0, -1, 2]


def test_equal_samples_stay_two() -> None:
    rows = build([call(0, [1], [2]), call(1, [1], [2])])
    assert [row.mask.tolist() for row in rows] == [[0, 1], [0, 1]]


def test_an_undelivered_answer_is_context_only() -> None:
    rows = build([call(0, [1], [2], flags=["undelivered_completion"]), call(1, [1, 2], [3])])
    assert [row.mask.tolist() for row in rows] == [[0, 0, 1]]


def test_a_row_over_several_versions_says_so() -> None:
    calls = [version_call(0, 3, [1], [2]), version_call(1, 4, [1, 2, 5], [6, 7])]
    (row,) = build(calls)
    assert row.versions.tolist() == [-1, 3, -1, 4, 4]
    assert row.mask.tolist() == [0, 1, 0, 1, 1]
    assert row.flags == all_flags(calls, [row]) == ["mixed_versions"]


def test_older_versions_are_context_where_mixing_is_masked() -> None:
    calls = [version_call(0, 3, [1], [2]), version_call(1, 4, [1, 2, 5], [6, 7])]
    calls.append(version_call(2, 3, [1, 2, 8], [9]))
    first, second = build(calls, chosen(mask=["mixed_versions"]))
    assert first.mask.tolist() == [0, 0, 0, 1, 1]
    assert first.logprobs.tolist()[:3] == [0, 0, 0]
    assert first.calls.tolist() == [-1, 0, -1, 1, 1]
    # What the first row gave up is not trained elsewhere.
    assert second.mask.tolist() == [0, 0, 0, 1]
    assert (first.flags, second.flags) == (["mixed_versions"], [])


def version_call(index: int, version: int, prompt: list[int], completion: list[int]) -> Call:
    return call(index, prompt, completion, versions=[VersionSpan(version, 0, len(completion))])


def test_prefixes_that_look_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # The worst luck: every prefix has the sum of every other.
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 9], [3]), call(3, [1, 2], [5])]
    right = pack(build(calls))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Zeros())
    assert pack(build(calls)) == right


class Zeros:
    def integers(self, low: int, high: int, size: int, dtype: type) -> np.ndarray:
        return np.zeros(size, dtype)


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
