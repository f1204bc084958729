"""Routed experts of calls are joined as their tokens are, and what does not fit is an error."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from envserver_records.errors import EngineGarbage, TokensError
from envserver_records.experts import RoutedExperts, experts_from, table_from_text, table_to_text
from envserver_records.records import Call, Sequence, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.extent import examples
from support.forests import calm, forests, talk
from support.trajectories import trajectory

from envserver.rollouts.kept_calls import calls_in, kept_calls
from envserver.tokens import build, check, find_parents, pack_calls
from envserver.tokens.experts import first_unknown, read_experts

LAYERS, EACH = 2, 3


def size_of(call: Call) -> int:
    return len(call.prompt_ids) + len(call.completion_ids)


def told(call: Call, start: int = 0) -> RoutedExperts:
    """What an engine tells: the numbers of the call and of the token."""
    table = np.zeros((max(0, size_of(call) - 1 - start), LAYERS, EACH), np.uint8)
    table[..., 0] = call.index
    table[..., 1] = (start + np.arange(len(table)))[:, None]
    return experts_from(table, start)


def first_that_computed(calls: list[Call], row: Sequence) -> list[int]:
    """The number of the call that gives the experts of each token, as far as they are known."""
    path = [next(call for call in calls if call.index == index) for index in row.path]
    known = [call for call in path if call.experts is not None]
    size = max((size_of(call) - 1 for call in known), default=0)
    return [next(call.index for call in known if at < size_of(call) - 1) for at in range(size)]


@settings(calm, max_examples=examples(80))
@given(forests(), st.data())
def test_each_token_has_the_experts_of_the_call_that_computed_it_first(
    calls: list[Call], data: st.DataObject
) -> None:
    """Whether a call tells all its tokens or only those that its parent lacks; some tell none."""
    exact = [call for call in calls if call.exact]
    asked: list[Call] = []
    for call, parent in zip(exact, find_parents(exact), strict=True):
        start = data.draw(st.sampled_from([0, first_unknown(asked[parent]) if parent >= 0 else 0]))
        silent = not size_of(call) or data.draw(st.integers(0, 5)) == 0
        asked.append(replace(call, experts=None if silent else told(call, start)))
    rows = build(asked)
    check(asked, rows)
    for row, plain in zip(rows, build(exact), strict=True):
        wanted = first_that_computed(asked, row)
        last = np.flatnonzero(row.mask)[-1]
        if len(wanted) < last or not any(call.experts for call in asked if call.index in row.path):
            assert row.experts is None
        else:
            assert row.experts is not None and row.experts.start == 0
            assert row.experts.table[:, 1, 0].tolist() == wanted
            assert row.experts.table[:, 0, 1].tolist() == [*range(len(wanted))]
            assert "experts_missing" not in row.flags
        assert pack(replace(row, experts=None, flags=plain.flags)) == pack(plain)


def test_a_row_says_that_experts_are_missing() -> None:
    first, second, third = talk()
    calls = [replace(first, experts=told(first)), second, replace(third, experts=told(third, 8))]
    (row,) = build(calls)
    assert row.experts is None and row.flags == ["experts_missing"]
    broken_off = replace(second, flags=["finish_abort"])
    (aborted,) = build([replace(first, experts=told(first)), broken_off])
    assert aborted.experts is not None  # none of the aborted answer is trained
    assert len(aborted.experts.table) == 2
    other = experts_from(np.zeros((size_of(second) - 1, LAYERS + 1, EACH), np.uint8))
    with pytest.raises(TokensError, match="form"):  # another model's
        build([calls[0], replace(second, experts=other)])


GOOD = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
BAD = {
    "not base64": "!",
    "not an .npy file": base64.b64encode(b"hello").decode(),
    "cut off": table_to_text(GOOD)[:-8],
    "of numbers with fractions": table_to_text(GOOD.astype(np.float32)),  # type: ignore[arg-type]
    "negative": table_to_text(GOOD.astype(np.int32) - 1),  # type: ignore[arg-type]
    "of one token less": table_to_text(GOOD[:3]),
    "of one token more": table_to_text(np.concatenate([GOOD, GOOD[:1]])),
    "of very many experts": table_to_text(np.zeros((4, 2**16, 2), np.uint8)),
}


OF_VLLM = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDcsIDQs"
    "IDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoDAgAA"
    "AgMBBAMFAAAGAgEEBQYAAAIFAAIDAAAAAwABAwMAAAACAwQDAwUAAAMEAQIDAgAAAwABBg=="
)
"""By vLLM 0.32.0 on an H100: 7 tokens from token 100 on; 4 layers, the second without experts; 2 of
8 experts."""


def test_what_vllm_tells_is_read() -> None:
    table = read_experts(OF_VLLM, 108, 100).table
    assert (table.shape, table.dtype, table.max()) == ((7, 4, 2), np.uint8, 6)
    assert not table[:, 1].any()
    assert all((table[:, layer, 0] != table[:, layer, 1]).all() for layer in (0, 2, 3))


def test_an_engine_may_tell_all_or_what_was_asked_for_and_else_is_at_fault() -> None:
    for text in BAD.values():
        with pytest.raises(EngineGarbage, match="engine"):
            read_experts(text, 5, 0)
    assert read_experts(table_to_text(GOOD), 5, 3).start == 0
    assert read_experts(table_to_text(GOOD), 9, 4).start == 4
    signed = io.BytesIO()
    np.save(signed, GOOD.astype(np.int32) + 300)
    table = table_from_text(base64.b64encode(signed.getvalue()).decode())
    assert table.dtype == np.uint16 and np.array_equal(table, GOOD.astype(np.uint16) + 300)


def test_calls_kept_as_json_leave_them_out() -> None:
    calls = [replace(each, experts=told(each)) for each in talk()]
    kept = kept_calls(trajectory("r", calls=pack_calls(calls, find_parents(calls))))
    again = calls_in(json.loads(json.dumps(kept)))
    assert [call.experts for call in again] == [None, None, None]
    assert again[2].prompt_ids.tolist() == calls[2].prompt_ids.tolist()
