"""Makes one group: runs its rollouts concurrently, retries failures, scores and judges them.

`policy` makes every decision. `run_single` runs one rollout without a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import structlog
from envserver_records.errors import Failure, RolloutError
from envserver_records.records import Group, Result, Score, Task, Trajectory, sealed
from envserver_records.waiting import cancel_and_wait
from structlog.contextvars import bind_contextvars

from ..environment import Environment, Isolation
from ..models.engine import Engine
from ..proxy.attempts import AgentRoute, AttemptSpec, Limits
from ..proxy.server import Proxy
from ..rollout_interface import HarnessSpec
from ..settings.config import RolloutsConfig, SamplingConfig
from ..telemetry.tracing import NO_TRACER, Tracer, current, evaluation, root, within
from ..tokens.builder import trained_ids
from ..tokens.flags import Actions
from ..tokens.images import shared
from ..tools.calling import place_of
from ..workers.pool import WorkerPool
from .agents import Demonstrator, demonstrating
from .attempt import Finished, StalenessMonitor, run_attempt, with_scoring_times
from .costs import RolloutPrices, ScoringSpent, with_scoring
from .estimates import scored_of
from .events import (
    GroupFailures,
    Observer,
    RolloutScored,
    RunningRollout,
    RunningRollouts,
    rollout_id_of,
    straggler,
    without_hidden,
)
from .policy import (
    Drop,
    GroupRules,
    Tries,
    UntrainedCeiling,
    blames_model,
    group_seconds_left,
    is_retried,
    judge_group,
    judge_losses,
    judge_trajectory,
    retry_delay_seconds,
    summed,
    untrained_of,
)
from .provenance import bounded_public, kept_config, provenance_of, rendering_of
from .scoring import SCORER_KILLED, SCORING_FAILURES, ScorerPool, score_once, scores_groups
from .stream import GroupRequest, request_for

_log = structlog.get_logger("envserver.rollouts")
_LATE = ["call_after_seal"]
"""Flags of a rollout whose agent made calls after the rollout had ended."""


class RolloutContext(msgspec.Struct, kw_only=True):
    """The parts that running groups needs; shared by all groups of a run.

    Args:
        proxy_url: address of the proxy for workers, without a trailing slash.
        agents: route of each agent, in a multi-agent rollout.
        need_exact: deliver only trajectories with exact tokens.
        slots: one per rollout in flight.
        made_with: the provenance that all groups share (`provenance.made_with`).
        ceiling: judges how many tokens flags keep from training.
        demonstrator: None if solutions are not needed.
        harness: the external agent; None: the environment's `rollout`.
    """

    environment: Environment
    isolation: Isolation
    env_reference: str
    engine: Engine
    proxy: Proxy
    proxy_url: str
    pool: WorkerPool
    scorer: ScorerPool
    model: str
    agents: dict[str, AgentRoute]
    sampling: SamplingConfig
    rollouts: RolloutsConfig
    actions: Actions
    keep_calls: bool
    need_exact: bool
    rules: GroupRules
    observer: Observer
    staleness: StalenessMonitor
    slots: asyncio.Semaphore
    demonstrator: Demonstrator | None
    ceiling: UntrainedCeiling
    made_with: dict[str, Any]
    prices: RolloutPrices = RolloutPrices()
    tracer: Tracer = NO_TRACER
    harness: HarnessSpec | None = None
    running: RunningRollouts = msgspec.field(default_factory=RunningRollouts)

    async def make(self, request: GroupRequest) -> Group | Drop:
        return await make_group(self, request)

    def publish_version(self, version: int) -> None:
        """Notes that the engine now serves `version` of the policy; cancels stale rollouts."""
        self.proxy.publish_version(version)
        self.staleness.publish(version)


async def make_group(
    context: RolloutContext, request: GroupRequest, rules: GroupRules | None = None
) -> Group | Drop:
    """Runs all rollouts of `request` and scores them; returns the group, or why it is not
    delivered.

    A group stops early once it cannot be delivered. `rules`: default: the environment's.
    """
    rules = rules or context.rules
    failures = GroupFailures(context.observer, request, context.keep_calls)
    rollouts = await _rollouts(context, request, rules, failures)
    drop = failures.bug or judge_losses(failures.lost, rules)
    if drop is not None:
        return drop
    try:
        scores = await group_scores(context, request.task, list(rollouts.values()))
    except SCORING_FAILURES as error:
        bug = error.detail.get("bug")
        message = without_hidden(bug or str(error), request.task.hidden)
        return Drop("unscorable", message, True, bug=bug is not None)
    trajectories = {
        number: trajectory_of(context, rollout, score)
        for (number, rollout), score in zip(rollouts.items(), scores, strict=True)
    }
    shown = await context.proxy.services.shown(request.group_id)
    made = _judged(context, request, rules, trajectories, failures, shown)
    if isinstance(made, Group):
        made = await asyncio.to_thread(sealed, made)
    # Last: a run that ends over its ceiling ends at once, but for groups that are being delivered.
    why_not = context.ceiling.judge(summed(rollout.untrained for rollout in rollouts.values()))
    if why_not is not None and (isinstance(made, Group) or made.reason == "incomplete"):
        return Drop("untrained", why_not, True)
    return made


async def _rollouts(
    context: RolloutContext, request: GroupRequest, rules: GroupRules, failures: GroupFailures
) -> dict[int, Finished]:
    started = time.monotonic()
    tasks = {
        asyncio.create_task(_rollout(context, request, number, failures)): number
        for number in range(rules.size)
    }
    pending = set(tasks)
    rollouts: dict[int, Finished] = {}
    enough_at: float | None = None
    try:
        while pending and not failures.bug and judge_losses(failures.lost, rules) is None:
            now = time.monotonic()
            left = group_seconds_left(
                context.rollouts, now - started, None if enough_at is None else now - enough_at
            )
            done, pending = await asyncio.wait(
                pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            for task in done:
                if (rollout := task.result()) is not None:
                    rollouts[tasks[task]] = rollout
            if enough_at is None and len(rollouts) >= rules.least:
                enough_at = time.monotonic()
    finally:
        await cancel_and_wait(*tasks)
    if not failures.bug and judge_losses(failures.lost, rules) is None:
        for number in sorted(tasks[task] for task in pending):
            failures.add(number, straggler(time.monotonic() - started), final=True)
    return dict(sorted(rollouts.items()))


async def _rollout(
    context: RolloutContext, request: GroupRequest, number: int, failures: GroupFailures
) -> Finished | None:
    rollout_id = rollout_id_of(request, number)
    bind_contextvars(rollout_id=rollout_id)
    about = {
        "envserver.rollout_id": rollout_id,
        "envserver.group_id": request.group_id,
        "envserver.task_id": request.task.id,
        "envserver.environment": request.env,
    }
    with root(context.tracer, "task", about), contextlib.suppress(RolloutError):
        return await _retried(
            context,
            failures.marking(
                partial(_try_rollout, context, request, number, failures),
                context.environment.config.group_size,
            ),
            lambda error, again: failures.add(number, error, final=not again),
            lambda: failures.scored,
        )
    return None


async def _retried(
    context: RolloutContext,
    attempt: Callable[[int], Awaitable[Finished]],
    failed: Callable[[RolloutError, bool], object],
    scored: Callable[[], int] = lambda: 0,
) -> Finished:
    """Calls `attempt` with the number of deaths so far, until it succeeds or fails for good.
    `failed`: called with each failure, and whether the rollout is retried; `scored`: see
    `is_retried`."""
    tries = Tries()
    while True:
        try:
            return await attempt(tries.deaths)
        except RolloutError as error:
            tries.add(error)
            most = context.rollouts.max_attempts
            again = is_retried(error, tries.counted, most, scored=scored())
            failed(error, again)
            if not again:
                raise
        await asyncio.sleep(retry_delay_seconds(max(tries.counted, 1), random.random()))


async def _try_rollout(
    context: RolloutContext,
    request: GroupRequest,
    number: int,
    failures: GroupFailures,
    deaths: int,
) -> Finished:
    rollout_id = rollout_id_of(request, number)
    with context.running.shown(request, number) as shown:
        async with context.slots:
            attempt = failures.next_attempt(number)
            shown.state, shown.since, shown.attempt = "playing", time.time(), attempt
            rollout = await run_once(context, request, rollout_id, attempt, deaths)
        shown.count(rollout.attempt.calls)  # the proxy has forgotten the attempt
        shown.state = "scoring"
        with within(current().child("score", {"envserver.environment": request.env})) as span:
            try:
                scorable = await _score(context, request.task, rollout)
            except RolloutError as error:
                error.turns, error.messages = rollout.trajectory.turns, rollout.trajectory.messages
                error.tokens = rollout.result.completion_tokens
                raise
            if scorable is not None and not scores_groups(context.environment):
                span.note({"envserver.reward": scorable, **evaluation("reward", scorable)})
    trajectory, calls = rollout.trajectory, rollout.attempt.calls
    trajectory.attempts = failures.of(number)
    rollout.untrained = untrained_of(
        (call for call in calls if call.trained),
        trajectory.sequences,
        trajectory.flags,
        context.actions,
        need_exact=context.need_exact,
    )
    context.observer(
        RolloutScored(
            group_id=request.group_id,
            rollout_id=rollout_id,
            scorable=scorable is not None,
            turns=trajectory.turns,
            completion_tokens=rollout.result.completion_tokens,
            seconds=trajectory.usage.seconds,
            flags=trajectory.flags,
            prompt_tokens=trajectory.usage.prompt_tokens,
            limit=trajectory.limit,
            untrained=rollout.untrained,
            usage=with_scoring(trajectory.usage, calls, rollout.spent, context.prices),
        )
    )
    failures.scored += 1
    return rollout


async def _score(context: RolloutContext, task: Task, rollout: Finished) -> float | None:
    with rollout.attempt.timeline.timed("scoring", "score"):
        rollout.score = await score_once(context.scorer, task, rollout.result, rollout.spent)
    reward = context.scorer.delivered(rollout.score).reward
    _watch_silence(context, rollout.result, reward)
    return reward


def _watch_silence(context: RolloutContext, result: Result, reward: float | None) -> None:
    """Warns, once, if the first rollouts all return None and get no reward."""
    environment, running = context.environment, context.running
    if running.silent is None or result.limit is not None:
        return
    nothing = max(context.scorer.rules.range.low, 0.0)
    is_silent = result.output is None and not result.turn_rewards and reward in (None, nothing)
    is_silent = is_silent and context.harness is None and not scores_groups(environment)
    running.silent = running.silent + 1 if is_silent else None
    if running.silent == environment.config.group_size:
        place = place_of(ValueError(), environment.rollout)
        _log.warning(
            "rollouts.nothing_returned",
            hint=f"All returned None and got no reward. Does `rollout` lack a `return`? {place}",
        )


async def run_once(
    context: RolloutContext, request: GroupRequest, rollout_id: str, attempt: int, deaths: int = 0
) -> Finished:
    """Runs one attempt of a rollout, without scoring it; `deaths`: see `blames_model`."""
    with demonstrating(
        context.demonstrator, context.environment, context.agents, request.task, rollout_id
    ):
        finished = await run_attempt(
            context,
            attempt_spec(context, request.task, rollout_id, attempt),
            blames_model=blames_model(context.rollouts, deaths),
        )
    if context.scorer.needs_token_ids:
        finished.result.completion_ids = trained_ids(finished.trajectory.sequences)
    return finished


def attempt_spec(context: RolloutContext, task: Task, rollout_id: str, attempt: int) -> AttemptSpec:
    config = context.environment.config
    return AttemptSpec(
        rollout_id=rollout_id,
        attempt=attempt,
        env=context.environment.name,
        env_reference=context.env_reference,
        env_config=config.model_dump(mode="json"),
        task=task,
        model=context.model,
        deadline=time.time() + config.worker_timeout,
        limits=Limits(
            max_turns=config.max_turns,
            max_completion_tokens=config.max_completion_tokens,
            max_row_tokens=config.max_token_length if context.rollouts.too_long == "end" else None,
        ),
        sampling=context.sampling.model_dump(),
        group_id=rollout_id.rpartition("-r")[0],
        agents=context.agents,
        isolation=context.isolation,
        keep_services=context.keep_calls,
        harness=context.harness,
    )


async def group_scores(
    context: RolloutContext, task: Task, rollouts: list[Finished]
) -> list[Score]:
    """Returns the final scores; what scoring the group takes is shared equally by `rollouts`."""
    scores = [rollout.score for rollout in rollouts]
    if not scores_groups(context.environment) or not rollouts:
        return scores
    spent = ScoringSpent()
    results = [rollout.result for rollout in rollouts]
    with contextlib.ExitStack() as timed:
        for rollout in rollouts:
            timeline = rollout.attempt.timeline
            timed.enter_context(timeline.timed("scoring", "score_group"))
        scores = await context.scorer.score_group(task, results, scores, spent)
    spent.share_with([rollout.spent for rollout in rollouts])
    return scores


def trajectory_of(context: RolloutContext, rollout: Finished, score: Score) -> Trajectory:
    """Completes the trajectory of a scored rollout. `score`: final, as the scorer gave it."""
    trajectory, attempt = rollout.trajectory, rollout.attempt
    trajectory.score = context.scorer.delivered(score)
    trajectory.usage = with_scoring(trajectory.usage, attempt.calls, rollout.spent, context.prices)
    trajectory.timings = with_scoring_times(trajectory.timings, attempt.timeline)
    trajectory.printed = attempt.timeline.lines()
    killed = [name for name in rollout.score.metrics if name == SCORER_KILLED]
    trajectory.flags = [*trajectory.flags, *_LATE[: attempt.late_calls], *killed]
    return trajectory


def _judged(
    context: RolloutContext,
    request: GroupRequest,
    rules: GroupRules,
    trajectories: dict[int, Trajectory],
    failures: GroupFailures,
    shown: dict[str, Any],
) -> Group | Drop:
    kept: dict[int, Trajectory] = {}
    for number, trajectory in trajectories.items():
        why_not = judge_trajectory(
            trajectory, need_exact=context.need_exact, actions=context.actions
        )
        if why_not is None:
            kept[number] = trajectory
        else:
            failures.add(number, why_not, final=True)
    rows = [row for item in kept.values() for row in item.sequences]
    versions = [int(row.versions[row.mask == 1].min()) for row in rows]
    delivered, images = shared(kept.values())
    group = request.group(
        trajectories=delivered,
        images=images,
        model=context.model,
        policy_version=min(versions, default=-1),
        generation_params=context.sampling.model_dump(),
        rendering=rendering_of(context.proxy, context.agents),
        services=shown,
        failures=failures.seen,
        asked=rules.size,
        lost=dict(failures.lost),
        env_config=kept_config(context.environment.config) if context.keep_calls else {},
        reward_range=context.scorer.rules.range,
        component_weights=context.scorer.rules.weights,
        public=bounded_public(request.task.public),
        missing={str(n): failures.of(n) for n in range(rules.size) if n not in kept},
        provenance=provenance_of(
            context.made_with,
            engine=context.proxy.engine_identity(),
            model=context.model,
            sampling=context.sampling.model_dump(),
            trajectories=kept.values(),
        )
        | ({"chosen": request.chosen} if request.chosen else {}),
    )
    drop = judge_group(group, rules, context.staleness.version)
    if drop is None:
        return group
    is_whole = judge_losses(group.lost, rules) is None
    return msgspec.structs.replace(drop, scored=scored_of(group) if is_whole else None)


async def run_single(
    context: RolloutContext, task: Task, *, scored: bool, failed: Callable[[Failure], object]
) -> Trajectory:
    """Runs `task` once, and again after failures of ours. `scored`: its answer is known; else its
    score has no reward."""
    if not scored:  # no solution is known
        context = msgspec.structs.replace(context, demonstrator=None)
    request = single_request(context.environment, task)
    rollout = await run_rollout(context, request, scored=scored, failed=failed)
    return trajectory_of(context, rollout, rollout.score)


async def run_rollout(
    context: RolloutContext,
    request: GroupRequest,
    *,
    scored: bool,
    failed: Callable[[Failure], object] = lambda failure: None,
) -> Finished:
    """Runs the only rollout of `request`; see `run_single`."""
    attempts = itertools.count(1)

    async def attempt(deaths: int) -> Finished:
        async with context.slots:
            rollout_id = rollout_id_of(request, 0)
            rollout = await run_once(context, request, rollout_id, next(attempts), deaths)
        if scored:
            await _score(context, request.task, rollout)
        return rollout

    return await _retried(
        context, attempt, lambda error, again: failed(error.failure()) if again else None
    )


def single_request(environment: Environment, task: Task) -> GroupRequest:
    """Returns the request for a rollout of `task` that belongs to no group."""
    return request_for(environment, task, f"single-{uuid.uuid4().hex[:12]}")


def running_rollouts(
    contexts: Iterable[RolloutContext], environment: str, limit: int
) -> tuple[list[RunningRollout], int]:
    """Returns up to `limit` rollouts in progress, oldest first of each environment ("": all), and
    how many there are."""
    found: list[RunningRollout] = []
    total = 0
    for context in contexts:
        if environment not in ("", context.environment.name):
            continue
        total += len(context.running.by_id)
        attempts, workers = context.proxy.running(), context.pool.workers()
        for rollout_id, shown in list(context.running.by_id.items())[: limit - len(found)]:
            worker = workers.get(rollout_id)
            if attempt := attempts.get(rollout_id):
                shown.count(attempt.calls)
            state = "waiting" if worker is None and shown.state == "playing" else shown.state
            found.append(msgspec.structs.replace(shown, state=state, worker=worker))
    return found, total
