"""Parses and checks posted groups as cheaply as possible.

In: raw JSON, and its gzip form if it came so. Out: groups whose bodies are the JSON that trainers
get. There are two parsers. The careful parser builds every value and reports exactly what is wrong.
The quick parser has simdjson read the per-token columns into arrays, which numpy checks, and keeps
their text; everything else passes through the same model and the same checks, with one token per
row. Input that is not clearly valid goes to the careful parser.

What holds: the quick parser accepts nothing that the careful parser refuses, and the bodies of
both contain the same keys with the same values.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np
import orjson
import simdjson
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from msgspec import Raw
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from ...formats.atropos import NOT_TRAINED
from ...store import compression
from ..bodies import Refused, parse_body
from .models import FLOAT32, VERSION_KEY, Array, ScoredData, check_groups

_GROUP: Final = TypeAdapter(ScoredData)
_GROUPS: Final = TypeAdapter(Array[ScoredData])
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
    return [
        replace(group, encoded=compression.encode(group.body)) if group.encoded is None else group
        for group in groups
    ]


def read_group(raw: bytes, gzipped: bytes | None = None) -> PostedGroup:
    """Parses the body of `POST /scored_data`.

    Args:
        gzipped: `raw` as one gzip member, as it came: stored as it is where that is enough.
    """
    found = _read_quickly(raw, gzipped) if len(raw) <= _QUICK_BYTES else None
    if found is not None:
        return found
    group = parse_body(raw, _GROUP)
    check_groups([group], listed=False)
    return _posted(group)


def read_groups(raw: bytes) -> list[PostedGroup]:
    """Parses the body of `POST /scored_data_list`; raises as `read_group` does."""
    found = _read_list_quickly(raw) if len(raw) <= _QUICK_BYTES else None
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
    return _made(group, body, [len(row) for row in group.tokens])


def _made(
    group: ScoredData,
    body: bytes,
    lengths: list[int],
    encoded: tuple[int, bytes] | None = None,
) -> PostedGroup:
    overrides = group.group_overrides or {}
    task_id = overrides.get("task_id")
    return PostedGroup(
        body=body,
        lengths=lengths,
        env_id=group.env_id,
        task_id=task_id if isinstance(task_id, str) else None,
        policy_version=overrides.get(VERSION_KEY),
        scores=group.scores,
        encoded=encoded,
    )


_NAMES: Final = tuple(ScoredData.model_fields)
_PER_TOKEN: Final[Mapping[str, str]] = {
    "tokens": "i",
    "masks": "i",
    "ref_logprobs": "d",
    "inference_logprobs": "d",
}
"""simdjson's type of each column: int64 or float64."""
_DTYPES: Final[Mapping[str, type[np.generic]]] = {"i": np.int64, "d": np.float64}
_KEYS: Final = re.compile(rb'"(%s)"' % "|".join(_PER_TOKEN).encode())
_ESCAPED_LETTER: Final = re.compile(rb"\\u00(?:5[fF]|[67])")
"""A letter or underscore that needs no escape: the key of a column may be written so."""
_SEARCHED_BYTES: Final = 256
_LONGEST_MATCH: Final = len('"inference_logprobs"')
_LIST: Final = msgspec.json.Decoder(list[Raw])
_KEPT_PARSER_BYTES: Final = 1024 * 1024
"""A parser keeps several times the memory of the largest text it read; larger ones get a new one.
"""


class _Parsers(threading.local):
    def __init__(self) -> None:
        self.parser = simdjson.Parser()


_parsers: Final = _Parsers()


class _Unsure(Exception):
    """The careful parser is needed."""


def _read_quickly(raw: bytes, gzipped: bytes | None = None) -> PostedGroup | None:
    """Parses with the quick parser; None if the careful parser is needed."""
    parser = _parsers.parser if len(raw) <= _KEPT_PARSER_BYTES else simdjson.Parser()
    try:
        return _group_quickly(raw, parser.parse(raw), gzipped)
    except (_Unsure, ValidationError, Refused, ValueError, TypeError, RuntimeError):
        return None


def _read_list_quickly(raw: bytes) -> list[PostedGroup] | None:
    groups: list[PostedGroup] = []
    try:
        parts = _LIST.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    for part in parts:
        group = _read_quickly(bytes(part))
        if group is None:
            return None
        groups.append(group)
    return groups


class _Column(NamedTuple):
    """One number for each token: as JSON, and as values of all rows, one after the other."""

    text: bytes
    lengths: list[int]
    values: NDArray[Any]


def _group_quickly(raw: bytes, document: Any, gzipped: bytes | None) -> PostedGroup:
    if not isinstance(document, simdjson.Object):
        raise _Unsure
    names = list(document.keys())
    if any("\0" in name for name in names):  # simdjson does not find those
        raise _Unsure
    values: dict[str, Any] = {name: document[name] for name in names}
    if len(values) != len(names) or any(_found(_ESCAPED_LETTER, b"\\", raw)):
        raise _Unsure
    characters = np.frombuffer(raw, np.uint8)
    places = [(key[1].decode(), key.end()) for key in _found(_KEYS, b'"', raw)]
    columns = {
        name: _column(
            raw, characters, values[name], kind, [at for key, at in places if key == name]
        )
        for name, kind in _PER_TOKEN.items()
        if isinstance(values.get(name), simdjson.Array) and len(values[name])
    }
    _check_columns(columns)
    lengths = columns["tokens"].lengths
    rest = {name: _json(value) for name, value in values.items() if name not in columns}
    known = {name: text for name, text in rest.items() if name in _NAMES}
    group = _GROUP.validate_json(_with_one_token(known, len(lengths)))
    check_groups([group], listed=False)
    if gzipped is not None and len(known) == len(rest) and _stays_the_same(group, known, raw):
        stored, body = compression.as_posted(gzipped, raw, _keys_it_lacks(values))
        return _made(group, body, lengths, stored)
    texts = {name: orjson.Fragment(column.text) for name, column in columns.items()}
    return _made(group, orjson.dumps(vars(group) | texts), lengths)


def _found(pattern: re.Pattern[bytes], first: bytes, raw: bytes) -> Iterator[re.Match[bytes]]:
    """Yields the matches of a pattern that begins with the byte `first`, in a tenth of `finditer`'s
    time: most of `raw` are numbers, which are jumped over.
    """
    at = raw.find(first)
    while at >= 0:
        end = at + _SEARCHED_BYTES
        for match in pattern.finditer(raw, at, end + _LONGEST_MATCH):
            if match.start() < end:
                yield match
        at = raw.find(first, end)


def _json(value: Any) -> bytes:
    """Returns a value of simdjson as JSON."""
    if isinstance(value, simdjson.Array | simdjson.Object):
        return cast(bytes, value.mini)  # the library's stub says str
    return orjson.dumps(value)


def _with_one_token(known: Mapping[str, bytes], rows: int) -> bytes:
    """Returns the same group as JSON, with one token in each row and without other columns."""
    short = b"[" + b",".join([b"[0]"] * rows) + b"]"
    fields = [b'"tokens":' + short, b'"masks":' + short]
    fields += [b'"%s":%s' % (name.encode(), text) for name, text in known.items()]
    return b"{" + b",".join(fields) + b"}"


def _stays_the_same(group: ScoredData, known: Mapping[str, bytes], raw: bytes) -> bool:
    """Returns whether validation changed nothing, such as a 1 into a 1.0."""
    before = b"{" + b",".join(b'"%s":%s' % (n.encode(), text) for n, text in known.items()) + b"}"
    after = {name: getattr(group, name) for name in known}
    return raw.startswith(b"{") and orjson.dumps(orjson.loads(before)) == orjson.dumps(after)


def _keys_it_lacks(values: Mapping[str, Any]) -> bytes:
    """Returns the end of a group's JSON: null for each key that it lacks, and the brace."""
    return b"".join(b',"%s":null' % name.encode() for name in _NAMES if name not in values) + b"}"


def _column(
    raw: bytes, characters: NDArray[np.uint8], array: Any, kind: str, places: Sequence[int]
) -> _Column:
    """Returns a column of `raw`.

    Args:
        array: its rows, parsed.
        places: where its key occurs in `raw`.
    """
    if len(places) != 1:  # also in a message
        raise _Unsure
    rows = list(array)
    if not all(isinstance(row, simdjson.Array) for row in rows):
        raise _Unsure
    lengths = [len(row) for row in rows]
    start = raw.index(b"[", places[0])
    end = start
    for _ in range(len(rows) + 1):
        end = raw.index(b"]", end) + 1
    text = characters[start:end]
    if not all(lengths) or np.count_nonzero(text == ord("[")) != len(rows) + 1:
        raise _Unsure
    # Others would be changed by encoding them again, to 1.0 from 1.
    if kind == "d" and np.count_nonzero(text == ord(".")) != sum(lengths):
        raise _Unsure
    values = np.frombuffer(array.as_buffer(of_type=kind), _DTYPES[kind])
    return _Column(raw[start:end], lengths, values)


def _check_columns(columns: Mapping[str, _Column]) -> None:
    """Raises _Unsure unless the columns can be trained on: as `check_groups`, and each mask is -100
    or the id of its token.
    """
    if "tokens" not in columns or "masks" not in columns:
        raise _Unsure
    tokens, masks = columns["tokens"].values, columns["masks"].values
    if any(column.lengths != columns["tokens"].lengths for column in columns.values()):
        raise _Unsure
    untrained = masks == NOT_TRAINED
    are_right = [tokens.min() >= 0, tokens.max() < 2**31, ((masks == tokens) | untrained).all()]
    for name in ("ref_logprobs", "inference_logprobs"):
        if name in columns:
            are_right.append(np.abs(columns[name].values).max() <= FLOAT32)
    if "inference_logprobs" in columns:
        logprobs = columns["inference_logprobs"].values
        are_likely = (logprobs >= LEAST_LOGPROB) & (logprobs <= LOGPROB_ROUNDING)
        are_right.append(are_likely.all() or (are_likely | untrained).all())
    if not all(are_right):
        raise _Unsure
