"""Runs one rollout of one task without a group, for `envserver run`."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable

import msgspec
from envserver_records.errors import Failure, RolloutError
from envserver_records.records import Score, Task, Trajectory

from .costs import ScoringSpent
from .group import Member, RolloutContext, run_once, trajectory_of
from .policy import counts_as_attempt, is_retried, retry_delay_seconds
from .score_once import score_once
from .stream import GroupRequest


async def run_single(
    context: RolloutContext, task: Task, *, scored: bool, failed: Callable[[Failure], object]
) -> Trajectory:
    """Runs `task` once, and again where a failure is ours.

    Args:
        scored: its answer is known; else its score has no reward.
        failed: told of each failure.

    Raises:
        RolloutError: the last try failed, too.
    """
    config = context.environment.config
    if not scored:  # nobody knows how to solve it
        context = msgspec.structs.replace(context, demonstrator=None)
    request = GroupRequest(
        group_id=f"single-{uuid.uuid4().hex[:12]}",
        index=0,
        env=context.environment.name,
        split=config.split,
        seed=config.seed,
        task=task,
    )
    attempt = tries = 0
    while True:
        attempt += 1
        try:
            async with context.slots:
                finished = await run_once(context, request, f"{request.group_id}-r0", attempt)
            score, spent = Score(reward=None), ScoringSpent()
            if scored:
                score = await score_once(context.scorer, task, finished.result, spent)
            member = Member(attempt, finished, score, spent=spent)
            return trajectory_of(context, request, 0, member, score)
        except RolloutError as error:
            tries += counts_as_attempt(error)
            if not is_retried(error, tries, context.rollouts.max_attempts):
                raise
            failed(error.failure())
        await asyncio.sleep(retry_delay_seconds(max(tries, 1), random.random()))
