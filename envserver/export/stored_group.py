"""A stored group as the record that a server holds: the inverse of `jsonl.group_line`.

What a line lacks is empty: how tokens were sampled, and, in files of older versions, which call
sampled each (-1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_type_hints

import msgspec
import numpy as np
from envserver_records.errors import Failure, InputError
from envserver_records.experts import experts_from
from envserver_records.images import ImageSpan
from envserver_records.records import (
    Conversation,
    Group,
    Score,
    Sequence,
    Tokens,
    Trajectory,
    Usage,
)
from envserver_records.scores import range_from_json
from envserver_records.timings import Timing

from .stored import StoredGroup, StoredRollout, StoredRow

_LEFT_OUT: Final = {"trajectories", "failures", "reward_range", "digest"}


def group_record(stored: StoredGroup) -> Group:
    """Returns a stored group as a record.
    Raises InputError: a value of its line has another form than in records.
    """
    told = stored.line["envserver"]
    facts = {key: told[key] for key in Group.__struct_fields__ if key in told}
    try:
        known = _converted(Group, facts, _LEFT_OUT)
        failures = msgspec.convert(stored.failures, list[Failure])
        rollouts = [
            trajectory_of(rollout, raw)
            for rollout, raw in zip(stored.rollouts, told["rollouts"], strict=True)
        ]
    except msgspec.ValidationError as error:
        raise InputError(f"{stored.place} is not a group: {error}.", place=stored.place) from error
    known = {"index": 0, "split": "train", **known}
    return Group(
        trajectories=rollouts,
        failures=failures,
        reward_range=range_from_json(told.get("reward_range") or {}),
        digest=str(told.get("group_digest") or ""),
        generation_params=stored.line.get("generation_params") or {},
        **known,
    )


def trajectory_of(rollout: StoredRollout, told: Mapping[str, Any] | None = None) -> Trajectory:
    """Returns a stored rollout as a record.

    Args:
        told: its part of the line, for facts that `StoredRollout` lacks.
    """
    known = {
        "rollout_id": rollout.rollout_id,
        "attempt": rollout.attempt,
        "task_id": rollout.task_id,
        "env": rollout.env,
        "sequences": [_sequence(*one, rollout.timings) for one in enumerate(rollout.rows)],
        "messages": rollout.messages,
        "tools": rollout.tools,
        "output": rollout.output,
        "score": Score(
            reward=rollout.reward,
            components=rollout.components,
            metrics=rollout.metrics,
            rewards=rollout.rewards,
            turns=rollout.turn_rewards,
        ),
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.truncated,
        "limit": rollout.limit,
        "turns": rollout.turns,
        "usage": msgspec.convert(rollout.usage, Usage, strict=False),
        "flags": rollout.flags,
        "metrics": rollout.agent_metrics,
        "actions": rollout.actions or [],
        "others": msgspec.convert(rollout.others, list[Conversation]),
        "turn_rewards": rollout.logged_turn_rewards,
        "agent_calls": rollout.agent_calls,
        "hooks": rollout.hooks,
        "egress": rollout.egress,
        "started_at": rollout.started_at,
        "timings": rollout.timings,
        "attempts": rollout.attempts,
        "printed": rollout.printed,
    }
    more = {key: told[key] for key in Trajectory.__struct_fields__ if key in told} if told else {}
    return Trajectory(**known, **_converted(Trajectory, more, {*known, "calls", "service_calls"}))


def _converted(
    record: type[msgspec.Struct], values: Mapping[str, Any], but: set[str]
) -> dict[str, Any]:
    """Returns the fields of a record among `values`, without those in `but`."""
    hints = get_type_hints(record)
    return {
        key: msgspec.convert(value, hints[key], strict=False)
        for key, value in values.items()
        if key not in but
    }


def _sequence(number: int, row: StoredRow, timings: list[Timing]) -> Sequence:
    length = len(row.tokens)
    calls = np.full(length, -1, np.int32)
    for one in timings:
        if one.row == number and one.call is not None:
            calls[one.start : one.end] = one.call
    return Sequence(
        tokens=row.tokens,
        mask=row.mask,
        logprobs=row.logprobs,
        calls=calls,
        versions=_versions(row, length),
        path=[],
        agent=row.agent,
        flags=row.flags,
        images=[ImageSpan(one.sha256, one.offset, one.length, one.grid) for one in row.images],
        experts=None if row.experts is None else experts_from(row.experts),
    )


def _versions(row: StoredRow, length: int) -> Tokens:
    """Returns the policy version of each token, from runs of [version, start, end)."""
    versions = np.full(length, -1, np.int32)
    for version, start, end in row.versions:
        versions[start:end] = version
    return versions
