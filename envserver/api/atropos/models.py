"""Request bodies of the Atropos protocol and their validation.

In: raw JSON. Out: validated models, or `Refused` with errors in FastAPI's form. Types are as lax
as in the original protocol (1.0, "7" and true are valid token ids). In addition, these are refused,
each with its place: NaN and infinities, mismatched lengths, groups without a token, token ids that
are negative or have more than 31 bits, numbers beyond float32, logprobs of trained tokens below
-1000, and masks that name another token than their row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from pydantic import BaseModel, ConfigDict, Field

from ...formats.atropos import NOT_TRAINED
from ..bodies import Refused, refusal

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
    """Base model: unknown fields are ignored; numbers must be finite."""

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
_PER_TOKEN: Final = ("ref_logprobs", "inference_logprobs")
# Rows of advantages may have any length: one per sequence is as common as one per token.
_PER_ROW: Final = ("advantages", "messages", "distill_token_ids", "distill_logprobs")


def check_groups(groups: Sequence[ScoredData], *, listed: bool) -> None:
    """Refuses groups that have the right types but cannot be used.

    Args:
        listed: whether the groups came as a list, so that places start with an index.
    """
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
    for field in _PER_TOKEN:
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
    """Yields the first error of each row of `masks` that is not of one of the two kinds."""
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
    """Yields errors for numbers that JSON cannot represent, anywhere inside a free-form field."""
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
