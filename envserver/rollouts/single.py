"""Runs one rollout of one task without a group, for `envserver run`."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable

import msgspec
from envserver_records.errors import Failure, RolloutError
from envserver_records.records import Score, Task, Trajectory

from ..environment import Environment
from .costs import ScoringSpent
from .group import Member, RolloutContext, run_once, trajectory_of
from .policy import Tries, is_retried, retry_delay_seconds
from .score_once import score_once
from .stream import GroupRequest


async def run_single(
    context: RolloutContext, task: Task, *, scored: bool, failed: Callable[[Failure], object]
) -> Trajectory:
    """Runs `task` once, and again where a failure is ours.

    Args:
        scored: its answer is known; else its score has no reward.
        failed: called with each failure.
    """
    if not scored:  # nobody knows how to solve it
        context = msgspec.structs.replace(context, demonstrator=None)
    request = single_request(context.environment, task)
    member = await run_member(context, request, scored=scored, failed=failed)
    return trajectory_of(context, request, 0, member, member.score)


async def run_member(
    context: RolloutContext,
    request: GroupRequest,
    *,
    scored: bool,
    failed: Callable[[Failure], object] = lambda failure: None,
) -> Member:
    """Runs the only rollout of `request`; arguments and errors are those of `run_single`."""
    attempt, tries = 0, Tries()
    while True:
        attempt += 1
        try:
            async with context.slots:
                rollout_id = f"{request.group_id}-r0"
                finished = await run_once(context, request, rollout_id, attempt, tries.deaths)
            score, spent = Score(reward=None), ScoringSpent()
            if scored:
                with finished.attempt.timeline.timed("scoring", "score"):
                    score = await score_once(context.scorer, request.task, finished.result, spent)
            return Member(attempt, finished, score, spent=spent)
        except RolloutError as error:
            tries.add(error)
            if not is_retried(error, tries.counted, context.rollouts.max_attempts):
                raise
            failed(error.failure())
        await asyncio.sleep(retry_delay_seconds(max(tries.counted, 1), random.random()))


def single_request(environment: Environment, task: Task) -> GroupRequest:
    """Returns the request for a rollout of `task` that belongs to no group."""
    config = environment.config
    return GroupRequest(
        group_id=f"single-{uuid.uuid4().hex[:12]}",
        index=0,
        env=environment.name,
        split=config.split,
        seed=config.seed,
        task=task,
    )
