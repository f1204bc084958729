"""The rewards that a rollout gave to its turns (`run.reward`), as records. Pure.

In: what the worker posted, and the calls that the proxy recorded. Out: TurnRewards, each for a turn
that exists. A turn is a call that its agent received an answer to; of several answers to one
request (`n`), the one that it went on with is the turn, which earned what came of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NoReturn

from envserver_records.errors import InputError, RewardError
from envserver_records.records import Call
from envserver_records.scores import TurnReward

from ..proxy.attempts import AttemptSpec, PostedReward
from ..tokens.builder import find_parents


def answered_calls(calls: Sequence[Call]) -> dict[str | None, list[int]]:
    """Returns the indices of the calls that each agent received an answer to, turn by turn.

    Of several answers to one request it is the one whose tokens a later prompt continues; if there
    is none or more than one, the first of them.

    Args:
        calls: all of an attempt, in order of commit: answers to one request are beside each other.
    """
    chosen = _continued(calls)
    answered: dict[str | None, list[int]] = {}
    for call in calls:
        if call.delivered == "none":
            continue
        turns = answered.setdefault(call.agent, [])
        if call.choice == 0:
            turns.append(call.index)
        elif call.index in chosen and turns and turns[-1] not in chosen:
            first = call.index - call.choice  # the first answer to the same request
            turns[-1] = call.index if turns[-1] >= first else turns[-1]
    return answered


def _continued(calls: Sequence[Call]) -> set[int]:
    """Returns the indices of the calls that others continue; none where no request had several
    answers."""
    if not any(call.choice for call in calls):
        return set()
    return {calls[parent].index for parent in find_parents(list(calls)) if parent >= 0}


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
