"""The fast reading of Atropos posts as text never accepts what the full parser refuses."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from envserver_clients.records import ClientGroup
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.extent import examples

from envserver.api.atropos import reading
from envserver.api.atropos.models import ScoredData, check_groups
from envserver.api.atropos.reading import PostedGroup, read_group
from envserver.api.bodies import Refused, Unreadable, parse_body
from envserver.store import compression

KEYS = list(ScoredData.model_fields)
ODD: list[Any] = [1.0, 0, -0.0, 1e-05, -999.5, -1000.5, -9999.0, 1e300, 2**31, 2**70, 10**400]
numbers = st.one_of(
    st.integers(-100, 200_000),
    st.floats(-20, 1, width=32),
    st.sampled_from([*ODD, True, "7", None]),
)
places = st.tuples(
    st.sampled_from([0, 1, 5, 5, 5, 2**31 - 1, 2**31, 10**10, -7]),
    st.sampled_from([0, 1, 5, 5, -100, -100, 9, 2**31 - 1, 2**31, 55, -101]),
)
"""A token and its mask; a good part of them fits together."""
usual = st.lists(st.lists(st.integers(0, 150_000), min_size=1, max_size=40), min_size=1, max_size=4)


def group(rows: list[list[int]], **fields: Any) -> dict[str, Any]:
    """A post that is right."""
    return {
        "tokens": rows,
        "masks": [[-100, *row[1:]] for row in rows],
        "scores": [0.5] * len(rows),
        "inference_logprobs": [[1.0] + [-0.0125] * (len(row) - 1) for row in rows],
    } | fields


def raw_group(rows: list[list[int]], **fields: Any) -> bytes:
    return json.dumps(group(rows, **fields)).encode()


def carefully(raw: bytes) -> PostedGroup:
    found = parse_body(raw, reading._GROUP)
    check_groups([found], listed=False)
    return reading._posted(found)


def assert_like_carefully(raw: bytes) -> None:
    """The same group, or the same errors."""
    try:
        expected = carefully(raw)
    except (Refused, Unreadable) as error:
        with pytest.raises(type(error)) as refused:
            read_group(raw)
        assert getattr(refused.value, "errors", None) == getattr(error, "errors", None)
        return
    for found in (read_group(raw), read_group(raw, gzip.compress(raw))):
        assert (found.lengths, found.env_id) == (expected.lengths, expected.env_id)
        mine, theirs = json.loads(found.body), json.loads(expected.body)
        # repr: 1 and 1.0 are not the same to a reader of JSON.
        assert repr({key: mine[key] for key in KEYS}) == repr(theirs)
        assert sorted(mine) == sorted(KEYS)
        if found.encoded is not None:
            assert compression.decode(*found.encoded) == found.body


@given(
    usual,
    st.dictionaries(st.text(), numbers, max_size=2),
    st.dictionaries(
        st.sampled_from(KEYS),
        st.one_of(
            numbers,
            st.lists(numbers, max_size=3),
            st.lists(st.lists(numbers, max_size=4), max_size=3),
            st.just([[{"role": "user", "content": "\ud800"}]]),
        ),
        max_size=2,
    ),
)
@example([[5]], {"\0": 1}, {})
@settings(max_examples=examples(150))
def test_other_fields_and_values_have_the_effect_that_they_always_had(
    rows: list[list[int]], more: dict[str, Any], odd: dict[str, Any]
) -> None:
    assert_like_carefully(json.dumps(more | group(rows) | odd).encode())


@given(usual, st.data())
@settings(max_examples=examples(150))
def test_damaged_bodies_have_their_usual_effect(rows: list[list[int]], data: st.DataObject) -> None:
    raw = bytearray(raw_group(rows))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        pieces = [b"", b"0", b"-", b".", b",", b"[", b"]", b"e9", b" "]
        raw[place : place + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from(pieces))
    assert_like_carefully(bytes(raw))


@given(st.lists(places, min_size=1, max_size=4))
@settings(max_examples=examples(200))
def test_clients_can_read_what_is_accepted(row: list[tuple[int, int]]) -> None:
    tokens, masks = [token for token, _ in row], [mask for _, mask in row]
    raw = raw_group([tokens], masks=[masks])
    assert_like_carefully(raw)
    is_named = all(mask in (token, -100) for token, mask in row)
    is_right = all(0 <= token < 2**31 for token in tokens) and (is_named or set(masks) <= {0, 1})
    try:
        found = read_group(raw)
    except Refused:
        assert not is_right
        return
    assert is_right
    (read,) = ClientGroup("g", "e", "atropos", -1, memoryview(found.body)).rows
    assert read.tokens.tolist() == tokens
    trained = [mask != -100 if is_named else mask == 1 for mask in masks]
    assert read.mask.tolist() == trained


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({}, True),
        ({"env_id": 0, "messages": [[{"role": "user", "content": "é"}]], "overrides": None}, True),
        ({"scores": [1]}, False),  # trainers get 1.0
        ({"inference_logprobs": [[1] * 100]}, False),
    ],
)
def test_what_trainers_get_unchanged_is_stored_so(fields: dict[str, Any], is_kept: bool) -> None:
    raw = raw_group([list(range(100))], **fields)
    gzipped = gzip.compress(raw)
    found = read_group(raw, gzipped)
    assert (found.encoded is not None and found.encoded[1].startswith(gzipped)) == is_kept
    assert json.loads(found.body) == json.loads(carefully(raw).body)
    if fields or found.encoded is None:
        return
    encoding, stored = found.encoded  # its damage is noticed
    harmed = [stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :] for at in range(len(stored))]
    for bad in (*harmed, stored[:-1], stored + stored[-1:], gzipped):
        try:
            assert compression.decode(encoding, bad) == found.body  # a byte of gzip's header
        except compression.DamagedBody:
            continue


def test_keys_that_are_written_with_an_escape_or_twice_are_noticed_wherever_they_are() -> None:
    right = json.dumps(group([[7, 8]]))
    escaped = right.replace('"tokens"', r'"tok\u0065ns"')
    filled = [r'{"x": "tokens", "y": [[9, 9]], "z": "\n' + "-" * n + '", ' for n in range(200, 300)]
    nested = '{"generation_params": {"tokens": 1}, "other": [[-9]], '
    for before in (nested, '{"x": "tokens", "y": [1], ', *filled):
        assert_like_carefully(escaped.replace("{", before, 1).encode())
    for before in filled:
        assert_like_carefully(right.replace("{", before, 1).encode())
