"""When a stored rollout ran, and when its turns did, as far as that is stored. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from envserver_records.records import Message

from .stored import StoredRollout

Span = tuple[float, float]
"""Begin and end, seconds since 1970."""


def rollout_times(rollout: StoredRollout) -> Span:
    """Returns when a rollout ran; in files of older versions it is taken to end with its group."""
    seconds = max(0.0, float(rollout.usage.get("seconds") or 0.0))
    began = rollout.started_at or max(0.0, rollout.created_at - seconds)
    return began, began + seconds


def turn_times(
    rollout: StoredRollout, agent: str | None, messages: Sequence[Message]
) -> list[Span] | None:
    """Returns the times of the model's messages in the conversation of `agent`.

    None where they are not stored, or where the conversation does not have all of its calls.
    """
    turns = sum(one.get("role") == "assistant" for one in messages)
    calls = rollout.agent_calls.get(agent or "", [])
    measured = {
        one.call: (rollout.started_at + one.started, rollout.started_at + one.started + one.seconds)
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
