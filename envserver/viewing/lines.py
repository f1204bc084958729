"""What a list shows of a group, read from its line of JSONL without decoding its tokens and texts.

In: lines of `envserver process` and their like. Out: a `LineFacts`, or the whole group. A line that
has only Atropos's keys is a group with a rollout for each row.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Final

import msgspec
import orjson
from envserver_records.errors import InputError
from envserver_records.records import Group
from envserver_records.scores import range_from_json

from ..export.stored import group_of, names_of_foreign
from ..export.stored_group import group_record
from ..store.facts import GroupFacts, facts_of_rewards


class LineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A group's columns; as in `store.rows.GroupRow` and `store.facts.GroupFacts`."""

    group_id: str
    env: str
    size: int
    tokens: int
    max_length: int
    policy_version: int
    created_at: float
    facts: GroupFacts


def facts_of_line(line: bytes, place: str) -> LineFacts | None:
    """Returns the facts of a line; None if it is JSON of another kind.
    Raises InputError: it is not JSON.
    """
    try:
        return _facts(_DECODER.decode(line), place)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{place} is not JSON: {error}.", place=place) from error


def group_of_line(line: bytes, place: str) -> Group:
    """Returns the whole group of a line. Raises InputError: it is not a group."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{place} is not JSON: {error}.", place=place) from error
    try:
        return group_record(group_of(value, place))
    except (TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise InputError(f"{place} is not a group: {error}.", place=place) from error


_Count = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**53)]
"""A number that the index can hold, also a sum of such."""


class _Usage(msgspec.Struct, frozen=True):
    seconds: float = 0.0
    completion_tokens: _Count = 0
    ended_by: str = "agent"


class _Rollout(msgspec.Struct):
    reward: float | None = None
    turns: _Count = 0
    truncated: bool = False
    flags: list[str] = []
    usage: _Usage = _Usage()


class _Origin(msgspec.Struct):
    group_id: str
    env: str
    task_id: str
    rollouts: list[_Rollout]
    split: str = "train"
    model: str = ""
    policy_version: _Count = -1
    created_at: float = 0.0
    reward_range: dict[str, float | None] | None = None


class _Line(msgspec.Struct):
    """The part of a line that a list needs; the decoder skips the rest."""

    tokens: list[msgspec.Raw]
    scores: list[float]
    envserver: _Origin | None = None
    env_id: Any = None
    group_id: str | None = None


_DECODER: Final = msgspec.json.Decoder(_Line)


def _facts(line: _Line, place: str) -> LineFacts:
    lengths = [_length(one) for one in line.tokens]
    origin = line.envserver or _adopted(line, place)
    rollouts, bounds = origin.rollouts, origin.reward_range
    solves = range_from_json(bounds) if bounds is not None else None
    facts = msgspec.structs.replace(
        facts_of_rewards([one.reward for one in rollouts], origin.task_id, solves),
        split=origin.split,
        model=origin.model,
        turns=max((one.turns for one in rollouts), default=0),
        completion_tokens=sum(one.usage.completion_tokens for one in rollouts),
        truncated=sum(one.truncated for one in rollouts),
        seconds=max((one.usage.seconds for one in rollouts), default=0.0),
        flags=sorted({flag for one in rollouts for flag in one.flags}),
        ends=dict(Counter(one.usage.ended_by for one in rollouts)),
    )
    return LineFacts(
        group_id=origin.group_id or names_of_foreign(None, None, place)[1],
        env=origin.env,
        size=len(rollouts),
        tokens=sum(lengths),
        max_length=max(lengths, default=0),
        policy_version=origin.policy_version,
        created_at=origin.created_at,
        facts=facts,
    )


def _length(tokens: msgspec.Raw) -> int:
    """Returns the number of values in a JSON list of numbers."""
    inner = bytes(tokens)[1:-1]
    return inner.count(b",") + bool(inner.strip())


def _adopted(line: _Line, place: str) -> _Origin:
    env, group_id = names_of_foreign(line.env_id, line.group_id, place)
    rollouts = [_Rollout(reward=score, turns=1) for score in line.scores]
    return _Origin(group_id=group_id, env=env, task_id=group_id, rollouts=rollouts)
