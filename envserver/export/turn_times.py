"""When a stored rollout ran, and when its turns did, as far as that is stored. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from envserver_records.records import Message

from .stored import StoredRollout

Span = tuple[float, float]
"""Begin and end, seconds since 1970."""


class Turn(NamedTuple):
    """A turn of a model: its times, and the tokens that it saw and sampled, if they are known."""

    began: float
    ended: float
    seen: int | None = None
    sampled: int | None = None


_LATEST: Final = 9.2e9
"""A moment of the year 2261, the last one of 64 bits of nanoseconds: files may say anything."""


def rollout_times(rollout: StoredRollout) -> Span:
    """Returns when a rollout ran; in files of older versions it is taken to end with its group."""
    seconds = used(rollout, "seconds")
    began = moment(rollout.started_at or rollout.created_at - seconds)
    return began, moment(began + seconds)


def used(rollout: StoredRollout, name: str) -> float:
    """Returns a number of `rollout.usage`, at least 0; 0 where there is none."""
    value = rollout.usage.get(name)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return 0.0
    return max(0.0, float(value))


def turn_times(
    rollout: StoredRollout, agent: str | None, messages: Sequence[Message]
) -> list[Turn] | None:
    """Returns the turns that the model's messages are in the conversation of `agent`.

    None where they are not stored, or where the conversation does not have all of its calls.
    """
    turns = sum(one.get("role") == "assistant" for one in messages)
    calls = rollout.agent_calls.get(agent or "", [])
    began = rollout.started_at
    measured = {
        one.call: Turn(
            moment(began + one.started),
            moment(began + one.started + one.seconds),
            one.start,
            None if one.start is None or one.end is None else one.end - one.start,
        )
        for one in rollout.timings
        if one.kind == "engine"
    }
    if not rollout.started_at or len(calls) != turns or not measured.keys() >= set(calls):
        return None
    return [measured[call] for call in calls]


def main_agent(rollout: StoredRollout) -> str | None:
    """Returns the agent of `rollout.messages`; None if it is the only one without a name."""
    others = {other.get("agent") for other in rollout.others}
    named = [row.agent for row in rollout.rows if row.agent and row.agent not in others]
    if named:
        return named[0]
    known = [agent for agent in rollout.agent_calls if agent and agent not in others]
    return known[0] if len(known) == 1 else None


def moment(seconds: float) -> float:
    """Returns a time in seconds since 1970 that every format can hold."""
    return min(max(seconds, 0.0), _LATEST) if math.isfinite(seconds) else 0.0
