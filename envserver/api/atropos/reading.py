"""Parses and checks posted groups as cheaply as possible.

In: raw JSON. Out: groups whose bodies are the JSON that trainers get. There are two parsers. The
careful parser builds every value and reports exactly what is wrong. The quick parser leaves
per-token columns as text: once a JSON parser has accepted them, a column that consists of digits
and the right brackets is rows of numbers. Everything else passes through the same model and the
same checks, with one token per row. Input that is not clearly valid goes to the careful parser.

What holds: the quick parser accepts nothing that the careful parser refuses, and the bodies of
both contain the same values in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Raw, UnsetType
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from ...store import compression
from ..bodies import Refused, parse_body
from .models import VERSION_KEY, Array, ScoredData, check_groups

_GROUP: Final = TypeAdapter(ScoredData)
_GROUPS: Final = TypeAdapter(Array[ScoredData])

_WHOLE: Final = b"0123456789-, \t\r\n"
_FRACTIONAL: Final = _WHOLE + b".e"
_SPACES: Final = b" \t\r\n"
_MASKED: Final = re.compile(rb"-100,(?:-100,)*")
_LARGE_NEGATIVE: Final = re.compile(rb"-\d{4}")
_DIGITS: Final = 9
"""Token ids with more digits may exceed int32."""
_QUICK_BYTES: Final = 32 * 1024 * 1024
"""For larger bodies the careful parser is used, which counts the values before it reads them."""


@dataclass(frozen=True)
class PostedGroup:
    """A group that may be stored.

    Args:
        body: JSON with the 14 keys of the protocol.
        lengths: number of tokens of each sequence.
        env_id: as posted.
        task_id: its task, if `group_overrides` names one.
        policy_version: the version in `group_overrides`; None: the version when it arrives.
        encoded: the body as stored, see `compression`; None if not made yet.
    """

    body: bytes
    lengths: list[int]
    env_id: int | None
    task_id: str | None = None
    policy_version: int | None = None
    scores: Sequence[float] = ()
    encoded: tuple[int, bytes] | None = None


def encoded(groups: Sequence[PostedGroup]) -> list[PostedGroup]:
    """Returns the groups with their bodies encoded for the store."""
    return [replace(group, encoded=compression.encode(group.body)) for group in groups]


def read_group(raw: bytes) -> PostedGroup:
    """Parses the body of `POST /scored_data`.

    Raises:
        Refused: it is invalid; the errors have FastAPI's form.
        Unreadable, TooLargeError: as for `parse_body`.
    """
    found = _read_quickly(raw, _ONE) if len(raw) <= _QUICK_BYTES else None
    if found is not None:
        return found[0]
    group = parse_body(raw, _GROUP)
    check_groups([group], listed=False)
    return _posted(group)


def read_groups(raw: bytes) -> list[PostedGroup]:
    """Parses the body of `POST /scored_data_list`; raises as `read_group` does."""
    found = _read_quickly(raw, _MANY) if len(raw) <= _QUICK_BYTES else None
    if found is not None:
        return found
    groups = parse_body(raw, _GROUPS)
    check_groups(groups, listed=True)
    return [_posted(group) for group in groups]


def _posted(group: ScoredData) -> PostedGroup:
    try:
        body = orjson.dumps(vars(group))
    except TypeError:  # a number of more than 64 bits
        body = _GROUP.dump_json(group)
    return _described(PostedGroup(body, [len(row) for row in group.tokens], group.env_id), group)


def _described(posted: PostedGroup, group: ScoredData) -> PostedGroup:
    """Adds what `group_overrides` says to the group."""
    told = group.group_overrides or {}
    task_id = told.get("task_id")
    return replace(
        posted,
        policy_version=told.get(VERSION_KEY),
        task_id=task_id if isinstance(task_id, str) else None,
        scores=group.scores,
    )


class _Columns(msgspec.Struct):
    """A group with unparsed columns; fields as in `ScoredData`."""

    tokens: Raw
    masks: Raw
    scores: Raw
    advantages: Raw | UnsetType = UNSET
    ref_logprobs: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    generation_params: Raw | UnsetType = UNSET
    inference_logprobs: Raw | UnsetType = UNSET
    overrides: Raw | UnsetType = UNSET
    group_overrides: Raw | UnsetType = UNSET
    images: Raw | UnsetType = UNSET
    env_id: Raw | UnsetType = UNSET
    distill_token_ids: Raw | UnsetType = UNSET
    distill_logprobs: Raw | UnsetType = UNSET


_ONE: Final = msgspec.json.Decoder(_Columns)
_MANY: Final = msgspec.json.Decoder(list[_Columns])
_PER_TOKEN: Final = {
    "tokens": _WHOLE,
    "masks": _WHOLE,
    "ref_logprobs": _FRACTIONAL,
    "inference_logprobs": _FRACTIONAL,
}
_NONE: Final = (b"null", b"[]")


def _read_quickly(
    raw: bytes, decoder: msgspec.json.Decoder[_Columns] | msgspec.json.Decoder[list[_Columns]]
) -> list[PostedGroup] | None:
    """Parses with the quick parser; None if the careful parser is needed."""
    try:
        if not raw.isascii():
            raw.decode()
        read = decoder.decode(raw)
        columns = read if isinstance(read, list) else [read]
        groups = [_group_quickly(group) for group in columns]
    except (_Unsure, msgspec.DecodeError, ValidationError, Refused, ValueError, RecursionError):
        return None
    return groups


class _Unsure(Exception):
    """The careful parser is needed."""


def _group_quickly(columns: _Columns) -> PostedGroup:
    texts: dict[str, bytes] = {}
    lengths: list[int] | None = None
    for name, letters in _PER_TOKEN.items():
        column = getattr(columns, name)
        text = b"null" if column is UNSET else bytes(column)
        if name in ("tokens", "masks") or text not in _NONE:
            found = _row_lengths(text, letters)
            lengths = lengths or found
            if found != lengths or (letters is _FRACTIONAL and _LARGE_NEGATIVE.search(text)):
                raise _Unsure
        texts[name] = text
    group = _GROUP.validate_json(_with_one_token(columns, len(lengths or ())))
    check_groups([group], listed=False)
    if not _are_labelled(texts["tokens"], texts["masks"]):
        raise _Unsure
    fields = vars(group) | {name: orjson.Fragment(text) for name, text in texts.items()}
    try:
        body = orjson.dumps(fields)
    except TypeError as error:  # a number of more than 64 bits
        raise _Unsure from error
    return _described(PostedGroup(body, lengths or [], group.env_id), group)


def _with_one_token(columns: _Columns, rows: int) -> bytes:
    """Returns the same group as JSON, with one token in each row of the columns."""
    short = b"[" + b",".join([b"[0]"] * rows) + b"]"
    fields = [b'"tokens":' + short, b'"masks":' + short]
    for name in columns.__struct_fields__:
        value = getattr(columns, name)
        if name not in _PER_TOKEN and value is not UNSET:
            fields.append(b'"%s":%s' % (name.encode(), bytes(value)))
    return b"{" + b",".join(fields) + b"}"


def _row_lengths(column: bytes, letters: bytes) -> list[int]:
    """Returns the number of values in each row of `column`, a JSON text of rows of numbers.

    Args:
        letters: characters that its numbers may contain.

    Raises:
        _Unsure: it is something else.
    """
    brackets = column.translate(None, letters)
    rows = len(brackets) // 2 - 1
    if rows < 1 or brackets != b"[" + b"[]" * rows + b"]":
        raise _Unsure
    characters = np.frombuffer(column, np.uint8)
    is_comma = characters == ord(",")
    if _has_long_number(is_comma):
        raise _Unsure
    lengths = _lengths(column, is_comma, rows)
    if letters is _WHOLE:
        plain = b"-0" not in column
    else:
        plain = _are_plain_fractions(characters, sum(lengths))
    if not plain:
        raise _Unsure
    return lengths


def _has_long_number(is_comma: NDArray[np.bool_]) -> bool:
    """Returns whether there may be a number of 35 characters: only those exceed float32 or the
    length that JSON parsers allow, and usual numbers are far shorter. Such a number covers four
    words of 8 characters, in which there is no comma.
    """
    words = is_comma[: len(is_comma) // 8 * 8].view(np.uint64)
    return not (words[:-3] | words[1:-2] | words[2:-1] | words[3:]).all()


def _are_labelled(tokens: bytes, masks: bytes) -> bool:
    """Returns whether all token ids have less than ten digits, and each mask is -100 or the id of
    its token.
    """
    rows = zip(_texts_of_rows(tokens), _texts_of_rows(masks), strict=True)
    return b"-" not in tokens and all(_is_labelled(ids, labels) for ids, labels in rows)


def _texts_of_rows(column: bytes) -> list[bytes]:
    """Returns the rows' numbers, each followed by a comma."""
    text = column.translate(None, _SPACES)
    return [row + b"," for row in text[2:-2].split(b"],[")]


def _is_labelled(ids: bytes, labels: bytes) -> bool:
    characters = np.frombuffer(ids, np.uint8)
    starts = np.append(0, np.flatnonzero(characters == ord(",")) + 1)
    if np.diff(starts).max() > _DIGITS + 1:
        return False
    number = end = 0
    for masked in _MASKED.finditer(labels):
        trained = labels[end : masked.start()]
        if not ids.startswith(trained, starts[number]):
            return False
        number += trained.count(b",") + len(masked[0]) // len(b"-100,")
        end = masked.end()
    return ids[starts[number] :] == labels[end:]


def _are_plain_fractions(characters: NDArray[np.uint8], values: int) -> bool:
    """Returns whether all numbers have a decimal point (others would be changed by re-encoding)
    and none is so large that it would become infinite.
    """
    if int(np.count_nonzero(characters == ord("."))) != values:
        return False
    exponents = np.flatnonzero(characters == ord("e"))
    return bool((characters[exponents + 1] == ord("-")).all())


def _lengths(column: bytes, is_comma: NDArray[np.bool_], rows: int) -> list[int]:
    lengths: list[int] = []
    end = 0
    for _ in range(rows):
        begin = column.index(b"[", end + 1)
        end = column.index(b"]", begin)
        if not column[begin + 1 : end].strip():
            raise _Unsure
        lengths.append(int(np.count_nonzero(is_comma[begin:end])) + 1)
    return lengths
