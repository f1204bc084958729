"""The rewards that a rollout gave to its turns (`run.reward`), as records. Pure.

In: what the worker posted, and the calls that the proxy recorded. Out: TurnRewards, each for a turn
that exists. A turn is a call that its agent received an answer to.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NoReturn

from envserver_records.errors import InputError, RewardError
from envserver_records.records import Call
from envserver_records.scores import TurnReward

from ..proxy.attempts import AttemptSpec, PostedReward


def answered_calls(calls: Sequence[Call]) -> dict[str | None, list[int]]:
    """Returns the indices of the calls that each agent received an answer to, turn by turn; of
    several answers to one request, the first."""
    answered: dict[str | None, list[int]] = {}
    for call in calls:
        if call.delivered != "none" and call.choice == 0:
            answered.setdefault(call.agent, []).append(call.index)
    return answered


def resolved(
    posted: Sequence[PostedReward],
    answered: Mapping[str | None, list[int]],
    committed_at: Sequence[float],
    spec: AttemptSpec,
) -> list[TurnReward]:
    """Returns the posted rewards with their agents, turns and calls.

    Args:
        answered: see `answered_calls`.
        committed_at: when each call was recorded, on the clock of PostedReward.

    Raises:
        RewardError: one is for an agent or a turn that does not exist.
    """
    return [_resolved(one, answered, committed_at, spec) for one in posted]


def _resolved(
    one: PostedReward,
    answered: Mapping[str | None, list[int]],
    committed_at: Sequence[float],
    spec: AttemptSpec,
) -> TurnReward:
    try:
        agent = spec.agent(one.agent)
    except InputError as error:
        _refuse(f"run.reward was called for the agent {one.agent!r}.", error.message)
    calls = answered.get(agent, [])
    whose = "" if agent is None else f" of {agent!r}"
    turn = one.turn
    if turn is None:
        turn = bisect.bisect([committed_at[call] for call in calls], one.at) - 1
        if turn < 0:
            _refuse(f"run.reward was called before the first answer to a call{whose}.")
    elif not 0 <= turn < len(calls):
        _refuse(
            f"run.reward was called for turn {turn}{whose}, which had {len(calls)}.",
            "Turns count the calls that the agent received an answer to, from 0.",
        )
    return TurnReward(turn, one.value, agent, calls[turn])


def _refuse(message: str, hint: str = "") -> NoReturn:
    raise RewardError(message, hint=hint, bug=f"A bug in the environment: {message} {hint}".strip())
