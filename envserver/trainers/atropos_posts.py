"""Request bodies of the Atropos protocol and their validation.

Types are as lax as in the original protocol (1.0, "7" and true are valid token ids). In addition,
these are refused, each with its place: NaN and infinities, mismatched lengths, groups without a
token, token ids that are negative or have more than 31 bits, numbers beyond float32, logprobs of
trained tokens below -1000, and masks that name another token than their row."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import orjson
import simdjson
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from msgspec import Raw
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..formats.atropos import NOT_TRAINED
from ..http.requests import Refused, parse_body, refusal
from ..store import packed

_MOST_ERRORS: Final = 100
_INT64: Final = 2**63 - 1
FLOAT32: Final = 3.4e38

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
"""Trainers keep token ids as int32."""
Float32 = Annotated[float, Field(ge=-FLOAT32, le=FLOAT32)]
"""Trainers compute with it: a larger number would be infinite there."""
Whole = Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)]
Name = Annotated[str, Field(max_length=256)]
"""Filters of runs have no longer ones."""
Text = Annotated[str, Field(max_length=4096)]
"""The state holds it, and is written whole."""
Share = Annotated[float, Field(allow_inf_nan=False)]

_Item = TypeVar("_Item")
Array = Annotated[list[_Item], Field(fail_fast=True)]
"""A list that reports only its first error: a few megabytes can contain a million errors."""


class WireModel(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Registration(WireModel):
    """Registers a trainer."""

    wandb_group: Text
    wandb_project: Text
    batch_size: Whole
    max_token_len: Whole
    checkpoint_dir: Text
    save_checkpoint_interval: Whole
    starting_step: Whole
    num_steps: Whole


class EnvironmentRegistration(WireModel):
    """Registers an environment."""

    max_token_length: Whole
    desired_name: Name
    weight: Share
    group_size: Whole
    min_batch_allocation: Share | None = None


class EnvironmentIdentifier(WireModel):
    env_id: int


class LeaseIdentifier(WireModel):
    lease_id: str


class ScoredData(WireModel):
    """A group of scored sequences. Its fields, in this order, are the keys of every response."""

    tokens: Array[Array[TokenId]]
    masks: Array[Array[int]]
    """-100 where a token is not trained, else the token's id; or 0 and 1."""
    scores: Array[Float32]
    advantages: Array[Array[Float32]] | None = None
    ref_logprobs: Array[Array[Float32]] | None = None
    messages: Array[Array[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: Array[Array[Float32]] | None = None
    overrides: Array[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: Array[Array[Array[TokenId]]] | None = None
    distill_logprobs: Array[Array[Array[Float32]]] | None = None


VERSION_KEY: Final = "policy_version"
"""Key of `group_overrides`: the oldest policy version of the group's tokens."""
_LAST_VERSION: Final = 2**31 - 1
_FREE_FIELDS: Final = ("messages", "generation_params", "overrides", "group_overrides", "images")
_PER_TOKEN_FIELDS: Final = ("ref_logprobs", "inference_logprobs")
# Rows of advantages may have any length: one per sequence is as common as one per token.
_PER_ROW: Final = ("advantages", "messages", "distill_token_ids", "distill_logprobs")


def check_groups(groups: Sequence[ScoredData], *, listed: bool) -> None:
    """Refuses groups that have the right types but cannot be used. `listed`: the groups came as a
    list, so places start with an index."""
    errors: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        place: tuple[str | int, ...] = (index,) if listed else ()
        for error in _faults(group):
            errors.append({**error, "loc": ["body", *place, *error["loc"]]})
            if len(errors) == _MOST_ERRORS:
                raise Refused(errors)
    if errors:
        raise Refused(errors)


def _faults(group: ScoredData) -> Iterator[dict[str, Any]]:
    rows = len(group.tokens)
    if rows == 0:
        yield refusal("empty_group", ["tokens"], "A group needs at least one sequence", [])
    for index, row in enumerate(group.tokens):
        if not row:
            yield refusal("empty_group", ["tokens", index], "A sequence needs a token", [])
    lengths = [len(row) for row in group.tokens]
    yield from _unlike_tokens("masks", group.masks, lengths)
    yield from _wrong_labels(group)
    yield from _extreme_logprobs(group)
    yield from _row_count("scores", len(group.scores), rows)
    for field in _PER_TOKEN_FIELDS:
        # Environments send an empty list to mean "none".
        if column := getattr(group, field):
            yield from _unlike_tokens(field, column, lengths)
    for field in _PER_ROW:
        if column := getattr(group, field):
            yield from _row_count(field, len(column), rows)
    if group.overrides and len(group.overrides) > rows:
        yield from _row_count("overrides", len(group.overrides), rows)
    yield from _unlike_distillation(group)
    yield from _bad_version(group)
    yield from _bad_messages(group)
    for field in _FREE_FIELDS:
        yield from _not_finite(field, getattr(group, field))


def _row_count(field: str, found: int, rows: int) -> Iterator[dict[str, Any]]:
    if found != rows:
        yield refusal("ragged", [field], f"{found} rows, but tokens has {rows}", found)


def _unlike_tokens(
    field: str, column: Sequence[Sequence[object]], lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    yield from _row_count(field, len(column), len(lengths))
    for index, (row, length) in enumerate(zip(column, lengths, strict=False)):
        if len(row) != length:
            message = f"{len(row)} values, but tokens has {length} in this row"
            yield refusal("ragged", [field, index], message, len(row))


def _wrong_labels(group: ScoredData) -> Iterator[dict[str, Any]]:
    for row, (tokens, labels) in enumerate(zip(group.tokens, group.masks, strict=False)):
        if tokens == labels or {0, 1}.issuperset(labels):
            continue
        for index, (token, label) in enumerate(zip(tokens, labels, strict=False)):
            if label not in (token, NOT_TRAINED):
                message = f"A mask has the token of its place, {token}, or {NOT_TRAINED}"
                yield refusal("wrong_mask", ["masks", row, index], message, label)
                break


def _extreme_logprobs(group: ScoredData) -> Iterator[dict[str, Any]]:
    """Yields the first trained token of each row whose logprob no sampled token has."""
    rows = zip(group.tokens, group.masks, group.inference_logprobs or (), strict=False)
    for row, (tokens, labels, logprobs) in enumerate(rows):
        untrained = NOT_TRAINED if tokens == labels or not {0, 1}.issuperset(labels) else 0
        for index, (label, logprob) in enumerate(zip(labels, logprobs, strict=False)):
            if label != untrained and not LEAST_LOGPROB <= logprob <= LOGPROB_ROUNDING:
                message = f"A sampled token has a logprob from {LEAST_LOGPROB:g} to 0"
                place: list[str | int] = ["inference_logprobs", row, index]
                yield refusal("extreme_logprob", place, message, logprob)
                break


def _unlike_distillation(group: ScoredData) -> Iterator[dict[str, Any]]:
    ids, logprobs = group.distill_token_ids, group.distill_logprobs
    if not ids or not logprobs:
        return
    for row, (row_ids, row_logprobs) in enumerate(zip(ids, logprobs, strict=False)):
        if [len(place) for place in row_ids] != [len(place) for place in row_logprobs]:
            message = "its shape differs from that of distill_token_ids in this row"
            yield refusal("ragged", ["distill_logprobs", row], message, len(row_logprobs))


def _bad_version(group: ScoredData) -> Iterator[dict[str, Any]]:
    version = (group.group_overrides or {}).get(VERSION_KEY)
    if version is not None and not (type(version) is int and 0 <= version <= _LAST_VERSION):
        message = f"A policy version is an integer from 0 to {_LAST_VERSION}"
        yield refusal("policy_version", ["group_overrides", VERSION_KEY], message, version)


def _bad_messages(group: ScoredData) -> Iterator[dict[str, Any]]:
    for row, conversation in enumerate(group.messages or ()):
        for index, message in enumerate(conversation):
            if "role" not in message or "content" not in message:
                place: list[str | int] = ["messages", row, index]
                text = "Value error, Message must have 'role' and 'content' fields"
                yield refusal("value_error", place, text, message)


def _not_finite(field: str, value: Any) -> Iterator[dict[str, Any]]:
    if _all_finite(value):
        return
    stack: list[tuple[list[str | int], Any]] = [([field], value)]
    while stack:
        place, item = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                yield refusal("finite_number", place, "Input should be a finite number", item)
        elif isinstance(item, Mapping):
            stack.extend(([*place, key], inner) for key, inner in item.items())
        elif isinstance(item, list):
            stack.extend(([*place, index], inner) for index, inner in enumerate(item))


def _all_finite(value: Any) -> bool:
    """Returns whether all numbers are finite: `_not_finite` without places, and so faster."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return True


# The quick parser accepts nothing that the careful parser refuses, and the bodies of both contain
# the same keys with the same values.

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
        task_id, policy_version: as in `group_overrides`; without a version: that at the arrival.
        encoded: the body as stored; None if not made yet.
    """

    body: bytes
    lengths: list[int]
    env_id: int | None
    task_id: str | None = None
    policy_version: int | None = None
    scores: Sequence[float] = ()
    encoded: tuple[int, bytes] | None = None


def encoded(groups: Sequence[PostedGroup]) -> list[PostedGroup]:
    return [
        replace(group, encoded=packed.encode(group.body)) if group.encoded is None else group
        for group in groups
    ]


def read_group(raw: bytes, gzipped: bytes | None = None) -> PostedGroup:
    """Parses the body of `POST /scored_data`. `gzipped`: `raw` as one gzip member, as it came:
    stored as it is where that is enough."""
    found = _read_quickly(raw, gzipped) if len(raw) <= _QUICK_BYTES else None
    if found is not None:
        return found
    group = parse_body(raw, _GROUP)
    check_groups([group], listed=False)
    return _posted(group)


def read_groups(raw: bytes) -> list[PostedGroup]:
    """Parses the body of `POST /scored_data_list`."""
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
"""A parser keeps several times the memory of the largest text it read: not for larger ones."""


class _Parsers(threading.local):
    def __init__(self) -> None:
        self.parser = simdjson.Parser()


_parsers: Final = _Parsers()


class _Unsure(Exception): ...


def _read_quickly(raw: bytes, gzipped: bytes | None = None) -> PostedGroup | None:
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
        stored, body = packed.as_posted(gzipped, raw, _keys_it_lacks(values))
        return _made(group, body, lengths, stored)
    texts = {name: orjson.Fragment(column.text) for name, column in columns.items()}
    return _made(group, orjson.dumps(vars(group) | texts), lengths)


def _found(pattern: re.Pattern[bytes], first: bytes, raw: bytes) -> Iterator[re.Match[bytes]]:
    """Yields the matches of a pattern that begins with the byte `first`, in a tenth of `finditer`'s
    time: most of `raw` are numbers, which are jumped over."""
    at = raw.find(first)
    while at >= 0:
        end = at + _SEARCHED_BYTES
        for match in pattern.finditer(raw, at, end + _LONGEST_MATCH):
            if match.start() < end:
                yield match
        at = raw.find(first, end)


def _json(value: Any) -> bytes:
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
    """Returns a column of `raw`: `array`: its parsed rows; `places`: where its key occurs
    in `raw`."""
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
    or the id of its token."""
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
