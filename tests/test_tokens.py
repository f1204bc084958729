"""Any forest of calls becomes rows in which each sampled token is trained exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envserver.errors import TokensError
from envserver.records import Call, Sequence, VersionSpan, pack, unpack
from envserver.tokens.builder import build
from envserver.tokens.invariants import check


def call(index: int, prompt: list[int], completion: list[int], **fields: object) -> Call:
    size = len(completion)
    known = {
        "index": index,
        "model": "m",
        "prompt_ids": np.array(prompt, np.int32),
        "completion_ids": np.array(completion, np.int32),
        "logprobs": -np.arange(1, size + 1, dtype=np.float32) / 8,
        "versions": [VersionSpan(index, 0, size)],
        "exact": True,
        "finish_reason": "stop",
        "message": {},
        "messages": [],
    }
    return Call(**(known | fields))


tokens = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def forests(draw: st.DrawFn) -> list[Call]:
    """Calls that extend earlier ones, repeat them or begin anew; of few tokens, to collide."""
    calls: list[Call] = []
    for index in range(draw(st.integers(0, 8))):
        prompt = draw(tokens)
        if calls and draw(st.booleans()):
            parent = draw(st.sampled_from(calls))
            seen = [*parent.prompt_ids.tolist(), *parent.completion_ids.tolist()]
            prompt = (
                seen[: draw(st.integers(0, len(seen)))] if draw(st.booleans()) else seen + prompt
            )
        calls.append(
            call(
                index,
                prompt,
                draw(tokens),
                agent=draw(st.sampled_from([None, "other"])),
                exact=draw(st.integers(0, 9)) > 0,
                flags=draw(st.sampled_from([[], [], ["undelivered_completion"]])),
            )
        )
    return calls


@given(forests())
def test_every_sampled_token_is_trained_once(calls: list[Call]) -> None:
    rows = build(calls)
    check(calls, rows)
    trained = sum(int(row.mask.sum()) for row in rows)
    assert trained == sum(len(c.completion_ids) for c in calls if c.exact and not c.flags)


@given(forests(), st.randoms(use_true_random=False))
def test_rows_survive_packing(calls: list[Call], random: object) -> None:
    for row in build(calls):
        assert pack(unpack(pack(row), Sequence)) == pack(row)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), tokens), max_size=5), st.data())
def test_independent_calls_may_come_in_any_order(
    exchanges: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    # Distinct first tokens make them independent of each other.
    prompts = [([100 + i, *prompt], completion) for i, (prompt, completion) in enumerate(exchanges)]
    shuffled = data.draw(st.permutations(prompts))

    def rows(pairs: list[tuple[list[int], list[int]]]) -> Counter[bytes]:
        built = build([call(i, prompt, completion) for i, (prompt, completion) in enumerate(pairs)])
        return Counter(row.tokens.tobytes() + row.mask.tobytes() for row in built)

    assert rows(prompts) == rows(shuffled)


def test_a_conversation_is_one_row() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6])]
    (row,) = build(calls)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert row.calls.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.logprobs.tolist() == [0, 0, -0.125, -0.25, 0, -0.125]
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


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (lambda row: row.mask.__setitem__(slice(None), 0), 3),
        (lambda row: row.tokens.__setitem__(2, 99), 1),
        (lambda row: row.logprobs.__setitem__(2, -7.0), 2),
        (lambda row: row.mask.__setitem__(0, 1), 3),
        (lambda row: row.tokens.__setitem__(0, 99), 4),
    ],
)
def test_a_changed_row_is_caught(change: object, invariant: int) -> None:
    calls = [call(0, [1, 2], [3, 4])]
    rows = build(calls)
    change(rows[0])
    with pytest.raises(TokensError) as caught:
        check(calls, rows)
    assert caught.value.detail["invariant"] == invariant


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": np.array([-1.0, np.nan], np.float32)},
        {"logprobs": np.array([-1.0, 0.5], np.float32)},
        {"logprobs": np.array([-1.0], np.float32)},
        {"versions": [VersionSpan(0, 0, 1)]},
        {"versions": [VersionSpan(0, 1, 2)]},
    ],
)
def test_an_impossible_call_is_caught(fields: dict[str, object]) -> None:
    calls = [call(0, [1, 2], [3, 4], **fields)]
    with pytest.raises(TokensError):
        check(calls, [])
