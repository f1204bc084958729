"""Runs one attempt: opens it at the proxy, runs the agent in a worker, reads what was recorded.

The attempt is sealed at the proxy whatever happens.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from envserver_records.errors import (
    AgentError,
    ConflictError,
    EngineRefused,
    Failure,
    HookError,
    InputError,
    LimitReached,
    Outcome,
    RewardError,
    RolloutError,
    ServiceError,
    Stale,
    WorkerError,
    WorkerGarbage,
    by_kind,
)
from envserver_records.records import (
    Call,
    Conversation,
    Result,
    SandboxUsage,
    Score,
    Sequence,
    Trajectory,
    Usage,
)
from envserver_records.tasks import CompactionRewards, TurnReward
from envserver_records.timings import MOST_TIMINGS, HookEvent, Timing

from ..environment import NO_REWARDS, Isolation
from ..proxy.attempts import AttemptSpec, PostedReward, ProxyAttempt, Timeline
from ..proxy.bounds import OVER_BOUND
from ..proxy.worker import job_of, take_result
from ..telemetry.tracing import agent_span, current, within
from ..tokens.builder import all_flags, build, find_parents
from ..tokens.compaction import mark_compaction
from ..tokens.flags import Actions
from ..tokens.images import held_by
from ..tokens.invariants import check
from ..tokens.trace import pack_calls
from ..workers.pool import Assignment, Spent
from .costs import ScoringSpent, tokens_of
from .policy import Untrained, is_stale, limit_of_death
from .rewards import reward_error

if TYPE_CHECKING:
    from .group import RolloutContext


class StalenessMonitor:
    def __init__(self, max_staleness: int | None) -> None:
        self.version = -1
        """The version published last; -1 before any."""
        self._most = max_staleness
        self._watched: dict[asyncio.Timeout, ProxyAttempt] = {}
        self._ended: dict[asyncio.Timeout, Stale] = {}

    def publish(self, version: int) -> None:
        """Notes that trainers now train `version`; a lower one means that they restarted."""
        self.version = version
        now = asyncio.get_running_loop().time()
        for timeout, attempt in self._watched.items():
            oldest = attempt.oldest_version
            if timeout not in self._ended and is_stale(oldest, version, self._most):
                self._ended[timeout] = Stale(
                    f"Version {oldest} sampled the first token; the latest is {version}.",
                    hint="See rollouts.max_staleness.",
                    oldest=oldest,
                    version=version,
                )
                timeout.reschedule(now)

    @asynccontextmanager
    async def watching(self, attempt: ProxyAttempt) -> AsyncIterator[None]:
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._watched[timeout] = attempt
                yield
        except TimeoutError:
            if timeout in self._ended:
                raise self._ended[timeout] from None
            raise
        finally:
            self._watched.pop(timeout, None)
            self._ended.pop(timeout, None)


def answered_calls(calls: list[Call]) -> dict[str | None, list[int]]:
    """Returns the indices of the calls that each agent received an answer to, turn by turn.

    Of several answers to one request it is the one whose tokens a later prompt continues, or else
    the first. `calls`: all of an attempt, in order of commit: answers to one request are beside
    each other.
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


def _continued(calls: list[Call]) -> set[int]:
    if not any(call.choice for call in calls):
        return set()
    return {calls[parent].index for parent in find_parents(list(calls)) if parent >= 0}


def _resolved(
    attempt: ProxyAttempt, posted: PostedReward, answered: Mapping[str | None, list[int]]
) -> TurnReward:
    """Returns a reward with its agent, turn and call. `answered`: see `answered_calls`."""
    try:
        agent = attempt.spec.agent(posted.agent)
    except InputError as error:
        said = f"run.reward was called for the agent {posted.agent!r}."
        raise reward_error(said, error.message) from error
    calls = answered.get(agent, [])
    whose = "" if agent is None else f" of {agent!r}"
    turn = posted.turn
    if turn is None:
        turn = bisect.bisect([attempt.committed_at[call] for call in calls], posted.at) - 1
        if turn < 0:
            raise reward_error(f"run.reward was called before the first answer to a call{whose}.")
    elif not 0 <= turn < len(calls):
        raise reward_error(
            f"run.reward was called for turn {turn}{whose}, which had {len(calls)}.",
            "Turns count the calls that the agent received an answer to, from 0.",
        )
    return TurnReward(turn, posted.value, agent, calls[turn])


def timings_of(timeline: Timeline, calls: list[Call], rows: list[Sequence]) -> list[Timing]:
    """Returns the times of an attempt. Where there are too many, its model calls come first."""
    places = _places(rows)
    found = [_of_call(timeline, call, places.get(call.index, _NOWHERE)) for call in calls]
    noted = sorted(timeline.timings, key=lambda timing: timing.started)
    kept = [*found, *noted][:MOST_TIMINGS]
    return sorted(kept, key=lambda timing: timing.started)


def with_scoring_times(timings: list[Timing], timeline: Timeline) -> list[Timing]:
    """Returns the times of an attempt with those of its scoring, which came last."""
    scoring = [timing for timing in timeline.timings if timing.kind == "scoring"]
    return [*timings[: MOST_TIMINGS - len(scoring)], *scoring]


class _Place(NamedTuple):
    row: int | None
    start: int | None
    end: int | None
    trained: bool


_NOWHERE = _Place(None, None, None, trained=False)


def _places(rows: list[Sequence]) -> dict[int, _Place]:
    """Returns where the tokens of each call are: in the row that trains them, else in the first."""
    found: dict[int, _Place] = {}
    for number, row in enumerate(rows):
        edges = [0, *(np.flatnonzero(np.diff(row.calls)) + 1).tolist(), row.calls.size]
        for start, end in pairwise(edges):
            call = int(row.calls[start]) if end > start else -1
            if call >= 0 and not found.get(call, _NOWHERE).trained:
                place = _Place(number, start, end, bool(row.mask[start:end].any()))
                if place.trained or call not in found:
                    found[call] = place
    return found


def _of_call(timeline: Timeline, call: Call, place: _Place) -> Timing:
    first = call.seconds_to_first
    return Timing(
        kind="engine",
        name=call.served_model or call.model,
        agent=call.agent,
        started=timeline.since_start(call.started_at),
        seconds=round(call.seconds, 4),
        first=None if first is None else round(first, 4),
        call=call.index,
        row=place.row,
        start=place.start,
        end=place.end,
    )


_ERRORS = by_kind(RolloutError)

_REQUESTS_FAULT = (400, 413, 422)
"""Statuses by which an engine refuses a request for what is in it."""
_LIMIT = re.compile(r"[a-z_]{1,20}")
_CUTTING_LIMITS = ("tokens", "time", "context", "crash")
"""Limits that cut an agent off; after the last turn, its answer is still complete."""
_SHORT_CALLS, _SHORT_TOKENS = 16, 50_000
"""Rows of up to so many calls and tokens are built in about a millisecond, without images and
experts."""


class Finished(msgspec.Struct, kw_only=True):
    """An attempt that can be scored. `trajectory` lacks what scoring adds (`group.trajectory_of`);
    `attempt`: its sealed record at the proxy; `score`: as the scorer gave it."""

    result: Result
    trajectory: Trajectory
    attempt: ProxyAttempt
    score: Score = msgspec.field(default_factory=lambda: Score(reward=None))
    spent: ScoringSpent = msgspec.field(default_factory=ScoringSpent)
    untrained: Untrained = Untrained()


async def run_attempt(
    context: RolloutContext, spec: AttemptSpec, *, blames_model: bool = False
) -> Finished:
    """Runs the agent once. `blames_model`: score it if it ends its worker. One in a sandboxed
    worker, which code of the model can reach, is always scored then."""
    attempt = context.proxy.open(spec)
    try:
        return await _run(context, spec, attempt, blames_model)
    except RolloutError as error:
        counted = counted_calls(attempt.calls, spec)
        error.turns, error.tokens = _turns(counted), _sampled(counted)
        if counted and context.environment.config.include_messages:
            last = main_call(counted, spec.agents) or counted[-1]
            error.messages = [*last.messages, last.message]
        raise


async def _run(
    context: RolloutContext, spec: AttemptSpec, attempt: ProxyAttempt, blames_model: bool
) -> Finished:
    isolation = spec.isolation
    spent, death = None, None
    try:
        async with context.staleness.watching(attempt), _ended_if_it_keeps_asking(attempt):
            with _traced(attempt, isolation):
                spent = await context.pool.run(
                    Assignment(
                        rollout_id=spec.rollout_id,
                        url=f"{context.proxy_url}/r/{attempt.key}",
                        env_reference=spec.env_reference,
                        isolation=isolation,
                        deadline=spec.deadline,
                        job=job_of(attempt),
                        take_result=partial(_take, attempt),
                    )
                )
    except WorkerError as error:
        death = error
    finally:
        context.proxy.seal(attempt)
    in_sandboxes = await context.proxy.settle(attempt)
    if isolation == "sandboxed" and attempt.calls and attempt.failure is not None:
        _withdraw_bug(attempt.failure)
    if death is None:
        limit = ending_limit(attempt, isolation)
    else:
        blames_model = blames_model or isolation == "sandboxed"
        limit = dying_limit(attempt, death, blames_model=blames_model)
    calls = list(attempt.calls)
    answered = answered_calls(calls)
    counted = counted_calls(calls, spec)
    trained = [call for call in calls if call.trained]
    config = context.environment.config
    work = partial(_built, attempt, calls, trained, context.actions, config.compaction_rewards)
    # A millisecond is not worth the way to a thread and back.
    built = work() if _is_short(trained) else await asyncio.to_thread(work)
    sequences, timings, images = built
    last = main_call(counted, spec.agents)
    result = Result(
        output=attempt.output,
        messages=[*last.messages, last.message] if last else [],
        finish_reason=last.finish_reason if last else None,
        truncated=limit in _CUTTING_LIMITS
        or attempt.limits.ended_agent
        or bool(last and last.finish_reason == "length"),
        limit=limit,
        turns=_turns(counted),
        completion_tokens=_sampled(counted),
        metrics=dict(attempt.metrics),
        flags=sorted(attempt.flags),
        actions=attempt.steps.taken(),
        turn_rewards=[_resolved(attempt, posted, answered) for posted in attempt.turn_rewards],
        calls={agent or "": indices for agent, indices in answered.items()},
    )
    started_at, shown = attempt.timeline.started_at, config.include_messages
    trajectory = Trajectory(
        rollout_id=spec.rollout_id,
        attempt=spec.attempt,
        task_id=spec.task.id,
        env=spec.env,
        sequences=sequences,
        messages=result.messages if shown else [],
        tools=last.tools if last else [],
        output=result.output,
        score=Score(reward=None),
        finish_reason=result.finish_reason,
        truncated=result.truncated,
        limit=limit,
        turns=result.turns,
        usage=_usage(calls, time.time() - started_at, spent, in_sandboxes, limit),
        flags=_flags(attempt, trained, sequences),
        metrics=result.metrics,
        calls=pack_calls(calls, find_parents(calls)) if context.keep_calls else [],
        actions=result.actions,
        others=other_conversations(calls, last) if shown else [],
        service_calls=attempt.asked_services,
        turn_rewards=result.turn_rewards,
        agent_calls=result.calls,
        hooks=_hook_events(attempt, calls),
        egress=[copy.copy(request) for request in attempt.egress.requests],
        started_at=started_at,
        timings=timings,
        images=images,
    )
    return Finished(result=result, trajectory=trajectory, attempt=attempt)


def _take(attempt: ProxyAttempt, result: bytes) -> None:
    with suppress(InputError, ConflictError):
        take_result(attempt, result)


def _withdraw_bug(failure: Failure) -> None:
    """Takes the bug out of a failure that code of the model may have reported.

    A refused `run.reward` stays one, in our words: each attempt would end with it. Code of the
    model that reports it loses its group, and ends a run only in which no group has worked yet.
    """
    failure.detail.pop("bug", None)
    if failure.kind == RewardError.kind:
        failure.detail["bug"] = f"A bug in the environment: {NO_REWARDS}"


def _hook_events(attempt: ProxyAttempt, calls: list[Call]) -> list[HookEvent]:
    of_calls = [
        msgspec.structs.replace(event, call=call.index) for call in calls for event in call.hooks
    ]
    return [*attempt.refused_requests, *of_calls]


@asynccontextmanager
async def _ended_if_it_keeps_asking(attempt: ProxyAttempt) -> AsyncIterator[None]:
    """Ends the block if an agent keeps asking after it has reached a limit."""
    ends = asyncio.timeout(None)
    try:
        async with ends:
            attempt.limits.watch(ends)
            yield
    except TimeoutError:
        if not ends.expired():
            raise
        attempt.limits.ended_agent = True
    finally:
        attempt.limits.watch(None)


@contextmanager
def _traced(attempt: ProxyAttempt, isolation: Isolation) -> Iterator[None]:
    spec = attempt.spec
    about = {
        **agent_span(spec.env, spec.rollout_id),
        "envserver.attempt": spec.attempt,
        "envserver.isolation": isolation,
    }
    with within(current().child(f"invoke_agent {spec.env}", about)) as attempt.span:
        yield


def _built(
    attempt: ProxyAttempt,
    calls: list[Call],
    trained: list[Call],
    actions: Actions,
    rule: CompactionRewards,
) -> tuple[list[Sequence], list[Timing], dict[str, bytes]]:
    """Takes tens of milliseconds for hundreds of long calls."""
    sequences = build(trained, actions)
    check(trained, sequences, actions)
    mark_compaction(sequences, calls, rule)
    shown = {image.sha256 for row in sequences for image in row.images}
    held = held_by(call.messages for call in trained) if shown else {}
    images = {sha256: held[sha256] for sha256 in sorted(shown)}
    return sequences, timings_of(attempt.timeline, calls, sequences), images


def _is_short(calls: list[Call]) -> bool:
    tokens = sum(len(call.prompt_ids) + len(call.completion_ids) for call in calls)
    has_more = any(call.images or call.experts is not None for call in calls)
    return len(calls) <= _SHORT_CALLS and tokens <= _SHORT_TOKENS and not has_more


def ending_limit(attempt: ProxyAttempt, isolation: Isolation = "pooled") -> str | None:
    """Returns the limit that ended the attempt; None if the agent ended by itself.

    Code of the model can reach a sandboxed worker: it is a "crash" if that posted no result or a
    malformed one, or if its agent failed after it asked the proxy for more than it may, or for what
    the engine refuses.
    """
    _raise_bug(attempt)
    failure, unanswered = attempt.failure, attempt.engine_failure
    # Nor is the model to blame for what follows a failed sandbox or service.
    ours = _failed_sandbox(attempt) or attempt.service_failure
    models_code = isolation == "sandboxed" and bool(attempt.calls)
    refused = unanswered is not None and unanswered.detail.get("status") in _REQUESTS_FAULT
    if models_code and refused:
        unanswered = None
    may_be_models = models_code and not (unanswered or ours)
    if failure is None:
        if not (attempt.posted or attempt.limits.ended_agent):
            if may_be_models:
                return "crash"
            raise WorkerGarbage("The worker reported that it was done, but posted no result.")
        if unanswered is not None and unanswered.outcome is Outcome.RETRY:
            # The agent went on after the engine failed; the model is not to blame.
            raise as_error(unanswered)
        if ours is not None:
            raise as_error(ours)
        return attempt.limit
    if failure.kind in (LimitReached.kind, AgentError.kind):
        # The agent's framework may have wrapped what the proxy answered, or tried again until a
        # limit was reached: then that is the cause.
        cause = unanswered or ours
        if cause is not None:
            raise as_error(cause)
        if attempt.limit is not None:
            return attempt.limit
        if failure.kind == LimitReached.kind:
            return _named_limit(failure)
    asked_too_much = refused or OVER_BOUND in attempt.flags
    if may_be_models and (
        failure.kind in (WorkerGarbage.kind, EngineRefused.kind)
        or (asked_too_much and failure.kind == AgentError.kind)
    ):
        return "crash"
    if failure.kind == ServiceError.kind and attempt.service_failure is not None:
        raise as_error(attempt.service_failure)  # the server knows why
    sandbox, place = attempt.sandbox_failure, failure.detail.get("sandbox", "")
    wrapped = bool(place) and failure.kind == AgentError.kind
    if sandbox is not None and (wrapped or failure.kind == sandbox.kind):  # and more of it
        error = as_error(sandbox)
        if place and "bug" in error.detail:
            error.detail["bug"] += f" {place}"
        raise error
    raise as_error(failure)


def _raise_bug(attempt: ProxyAttempt) -> None:
    failure = attempt.service_failure
    if failure is not None and failure.kind == HookError.kind:
        raise as_error(failure)


def _failed_sandbox(attempt: ProxyAttempt) -> Failure | None:
    """Code of the model, too, can ask for a sandbox that is not declared."""
    failure = attempt.sandbox_failure
    return None if failure is not None and "bug" in failure.detail else failure


def _named_limit(failure: Failure) -> str:
    name = str(failure.detail.get("limit", ""))
    return name if _LIMIT.fullmatch(name) else "time"


def dying_limit(attempt: ProxyAttempt, death: WorkerError, *, blames_model: bool) -> str:
    """Returns the limit that the model exceeded by ending its own worker."""
    _raise_bug(attempt)
    overdue = attempt.seconds_left <= 0
    limit = limit_of_death(death, spoke=bool(attempt.calls), overdue=overdue)
    if limit is None or not blames_model:
        raise death
    cause = attempt.engine_failure or _failed_sandbox(attempt) or attempt.service_failure
    if cause is not None and cause.outcome is Outcome.RETRY:
        raise as_error(cause)
    return limit


def as_error(failure: Failure) -> RolloutError:
    """Returns the exception that `failure` describes (a broken worker may send an unknown kind)."""
    error = _ERRORS.get(failure.kind, WorkerGarbage)(failure.message, hint=failure.hint)
    error.detail = dict(failure.detail)  # sent by a worker: any key is possible
    return error


def counted_calls(calls: list[Call], spec: AttemptSpec) -> list[Call]:
    if spec.agents and not any(route.trained for route in spec.agents.values()):
        return calls
    return [call for call in calls if call.trained]


def main_call(calls: list[Call], declared: Iterable[str] = ()) -> Call | None:
    """Returns the last delivered call of the first declared agent, or else of the first caller."""
    latest = {call.agent: call for call in _delivered(calls)}
    first = next((name for name in declared if name in latest), next(iter(latest), None))
    return latest.get(first)


def other_conversations(calls: list[Call], main: Call | None) -> list[Conversation]:
    """Returns the last conversation of each agent except `main`, in the order of first calls."""
    latest = {call.agent: call for call in _delivered(calls)}
    return [
        Conversation(
            agent=agent,
            trained=last.trained,
            model=last.model,
            messages=[*last.messages, last.message],
            tools=last.tools,
            turns=_turns([call for call in calls if call.agent == agent]),
            completion_tokens=_sampled([call for call in calls if call.agent == agent]),
        )
        for agent, last in latest.items()
        if main is None or agent != main.agent
    ]


def _delivered(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.delivered != "none" and call.choice == 0]


def _turns(calls: list[Call]) -> int:
    return sum(call.choice == 0 for call in calls)


def _sampled(calls: list[Call]) -> int:
    return sum(len(call.completion_ids) for call in calls)


def _usage(
    calls: list[Call],
    seconds: float,
    spent: Spent | None,
    in_sandboxes: SandboxUsage | None,
    limit: str | None,
) -> Usage:
    prompt_tokens, completion_tokens = tokens_of(calls)
    return Usage(
        seconds=seconds,
        model_seconds=sum(call.seconds for call in calls if call.choice == 0),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        sandbox=in_sandboxes,
        ended_by=limit or "agent",
        worker_cpu_seconds=None if spent is None else spent.cpu_seconds,
        worker_peak_memory_mb=None if spent is None else spent.peak_memory_mb,
    )


def _flags(attempt: ProxyAttempt, calls: list[Call], sequences: list[Sequence]) -> list[str]:
    flags = set(all_flags(calls, sequences)) | attempt.flags
    if attempt.engine_failures:
        flags.add("engine_error_seen")
    return sorted(flags)
