"""One running attempt at a task: its limits, its recorded calls, and what its worker posted.

Requests of one attempt may run in parallel. A turn is counted when a request is admitted, and its
tokens are reserved until it ends, so no interleaving exceeds a limit. A request that wants more
tokens than are unreserved waits for what the others return.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from envserver_records.errors import (
    ConflictError,
    EngineError,
    EngineRefused,
    EnvserverError,
    Failure,
    InputError,
    LimitReached,
    Outcome,
    SandboxError,
    SandboxUnavailable,
    ServiceError,
)
from envserver_records.records import Call, ServiceCall, Task
from envserver_records.timings import (
    MOST_PRINTED,
    MOST_TIMINGS,
    HookEvent,
    Printed,
    Stream,
    Timing,
    TimingKind,
)

from ..actions import Steps
from ..environment import Isolation
from ..rollout_interface import HarnessSpec
from ..telemetry.redaction import LogBudget, printable, redacted
from ..telemetry.tracing import NO_SPAN, Span
from .asgi import Interrupts, context_limit, retrieve
from .bounds import InFlight
from .egress_rules import EgressUse
from .recorded import RecordedPrompts, RecordedRequests
from .retries import SIDE, Retries, SideCalls

if TYPE_CHECKING:
    from ..tokens.history import History
    from .dialects.base import ModelRequest


_LONGEST_NAME = 120
_MOST_LINES = 500
_MOST_SECONDS = 1e9


class Timeline:
    """The times of one attempt, which begins now; `timings` are in order of their ends."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.timings: list[Timing] = []
        self._printed: deque[Printed] = deque()
        self._characters = 0

    @contextmanager
    def timed(self, kind: TimingKind, name: str) -> Iterator[None]:
        began = time.time()
        try:
            yield
        finally:
            self.note(kind, name, began, time.time() - began)

    def note(self, kind: TimingKind, name: str, began: float, seconds: float) -> None:
        """Records what began at `time.time()` = `began`."""
        if len(self.timings) < MOST_TIMINGS or kind == "scoring":
            name = printable(name[:_LONGEST_NAME])
            started = self.since_start(began)
            self.timings.append(
                Timing(kind=kind, name=name, started=started, seconds=_rounded(seconds))
            )

    def since_start(self, at: float) -> float:
        """Returns seconds from the start of the attempt; a clock that was set back counts as 0."""
        return _rounded(at - self.started_at)

    def printed(self, at: float, stream: Stream, text: str) -> None:
        """Keeps a line without secrets and control characters; drops the oldest for it."""
        shown = redacted(printable(text[-MOST_PRINTED:], keep="\t"))[-MOST_PRINTED:]
        self._printed.append(Printed(self.since_start(at), stream, shown))
        self._characters += len(shown)
        while self._characters > MOST_PRINTED or len(self._printed) > _MOST_LINES:
            self._characters -= len(self._printed.popleft().text)

    def lines(self) -> list[Printed]:
        return sorted(self._printed, key=lambda line: line.time)


def _rounded(seconds: float) -> float:
    return round(min(max(0.0, seconds), _MOST_SECONDS), 4)


# Some frameworks retry every error. An agent that is refused three times for the same limit is
# ended a few seconds later instead of at the rollout's deadline; it may still finish by itself
# until then.

MOST_REFUSALS = 3
GRACE_SECONDS = 3.0
"""Time in which an agent may end by itself after its last refusal that counts."""
AT_ONCE_SECONDS = 0.25
"""Refusals that come faster count as one: requests that were sent in parallel."""


@dataclass
class _Refused:
    times: int
    counted_at: float


class ReachedLimits:
    def __init__(self) -> None:
        self._refused: dict[tuple[str, str | None], _Refused] = {}
        self._ends: asyncio.Timeout | None = None
        self.ended_agent = False
        """Whether an agent was ended because it kept asking."""

    @property
    def latest(self) -> str | None:
        """The limit that was reached last; None: no limit holds an agent back."""
        return next((limit for limit, _ in reversed(self._refused)), None)

    def watch(self, ends: asyncio.Timeout | None) -> None:
        """From now on an agent that keeps asking lets `ends` expire; None: stops watching.

        A timeout holds its task, and that the rollout's record: one that stayed here would keep it
        until the next collection of old cycles, some 30,000 rollouts later.
        """
        self._ends = ends

    def refused(self, limit: str, agent: str | None) -> None:
        now = time.monotonic()
        before = self._refused.pop((limit, agent), None) or _Refused(0, now - AT_ONCE_SECONDS)
        self._refused[limit, agent] = before
        if now - before.counted_at < AT_ONCE_SECONDS:
            return
        before.times, before.counted_at = before.times + 1, now
        if before.times == MOST_REFUSALS and limit != "time" and self._ends is not None:
            self._ends.reschedule(asyncio.get_running_loop().time() + GRACE_SECONDS)

    def answered(self, agent: str | None) -> None:
        """Forgets refusals by the context limit and by hooks: the agent has adapted."""
        forgotten = [self._refused.pop((limit, agent), None) for limit in ("context", "refused")]
        ending = any(
            refusal is not None and refusal.times >= MOST_REFUSALS for refusal in forgotten
        )
        if not ending or self._ends is None:
            return
        if all(other.times < MOST_REFUSALS for other in self._refused.values()):
            self._ends.reschedule(None)


_MAX_LOG_BYTES = 8 * 1024 * 1024
"""Maximum size of all log lines of an attempt together."""


class Limits(msgspec.Struct, frozen=True):
    """Turns are counted for each agent, completion tokens for all trained ones together; a row is a
    trained call's prompt and answer. None: unlimited."""

    max_turns: int
    max_completion_tokens: int | None
    max_row_tokens: int | None = None


class AgentRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the engine of one agent of an attempt.

    Args:
        sampling: see AttemptSpec.
        endpoint: name of its own engine; "" for the run's engine.
        follows_policy: whether the policy serves it, so that its samples have policy versions.
    """

    model: str
    sampling: dict[str, Any]
    trained: bool = True
    endpoint: str = ""
    follows_policy: bool = True


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's task, environment and limits.

    Args:
        env_reference: what a worker loads the environment from.
        task: with its hidden part, for services; `worker.job_of` leaves that out.
        deadline: seconds, as `time.time()`.
        sampling: `temperature`, `top_p` (both forced) and `max_tokens` (a cap).
        agents: the route of each declared agent by name, the main one first; empty: a single agent.
        isolation: of its worker; code of the model can reach it if that is "sandboxed".
        endpoint: name of the engine where no agents are declared; "" for the run's engine.
        harness: the external agent; None: the environment's `rollout`.
    """

    rollout_id: str
    attempt: int
    env: str
    env_reference: str
    env_config: dict[str, Any]
    task: Task
    model: str
    deadline: float
    limits: Limits
    sampling: dict[str, Any]
    group_id: str = ""
    agents: dict[str, AgentRoute] = msgspec.field(default_factory=dict)
    isolation: Isolation = "pooled"
    keep_services: bool = False
    endpoint: str = ""
    harness: HarnessSpec | None = None

    def agent(self, name: str | None) -> str | None:
        """Returns the agent for a request that names `name`; without a name, the main agent."""
        if name in self.agents:
            return name
        if name is None:
            return next(iter(self.agents), None)
        known = f"there are: {', '.join(self.agents)}" if self.agents else "none is declared"
        raise InputError(
            f"There is no agent {name!r} in this rollout; {known}.",
            hint="Environment.agents declares the agents, the main one first.",
        )

    def route(self, agent: str | None) -> AgentRoute:
        known = self.agents.get(agent or "")
        return known or AgentRoute(model=self.model, sampling=self.sampling, endpoint=self.endpoint)

    def routing_key(self, agent: str | None) -> str:
        """Returns the routing key of `agent`'s calls: calls with one key go to one replica."""
        return routing_key(self.rollout_id, agent)


class PostedReward(msgspec.Struct, frozen=True):
    """A reward that the rollout gave to a turn.

    Args:
        at: when, by `time.monotonic()`, which all processes of a machine share.
        turn: the turn's number; None: the latest call of the agent at that time.
    """

    value: float
    at: float
    turn: int | None = None
    agent: str | None = None


def routing_key(rollout_id: str, agent: str | None) -> str:
    return rollout_id if agent is None else f"{rollout_id}/{agent}"


@dataclass(eq=False)
class ProxyAttempt:
    """The record of one running attempt.

    Args:
        calls: in order of commit; committed_at: when, by `time.monotonic()`.
        refused_requests: those that hooks refused before the engine got them.
        flags: flags that services put on the trajectory.
        output, metrics, steps, posted, failure: posted by the worker.
        log_budget: what the attempt may still write to the server's log.
        histories: the conversations that can be continued, by engine.
        span: trace span of the agent's run, the parent of its model calls.
        planning: held while one of its long prompts is planned, or waits for that.
    """

    key: str
    spec: AttemptSpec
    calls: list[Call] = field(default_factory=list)
    committed_at: list[float] = field(default_factory=list)
    turn_rewards: list[PostedReward] = field(default_factory=list)
    sealed: bool = False
    limits: ReachedLimits = field(default_factory=ReachedLimits)
    engine_failures: int = 0
    sandbox_failure: Failure | None = None
    service_failure: Failure | None = None
    service_calls: int = 0
    asked_services: list[ServiceCall] = field(default_factory=list)
    refused_requests: list[HookEvent] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    output: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)
    posted: bool = False
    failure: Failure | None = None
    late_calls: int = 0
    log_budget: LogBudget = field(
        default_factory=lambda: LogBudget(time.monotonic(), _MAX_LOG_BYTES)
    )
    log_lines_dropped: int = 0
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    retries: Retries = field(default_factory=Retries)
    histories: dict[Any, History] = field(default_factory=dict)
    span: Span = NO_SPAN
    in_flight: InFlight = field(default_factory=InFlight)
    recorded: RecordedRequests = field(init=False)
    prompts: RecordedPrompts = field(default_factory=RecordedPrompts)
    egress: EgressUse = field(default_factory=EgressUse)
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    timeline: Timeline = field(default_factory=Timeline)
    _unanswered: dict[str | None, Failure] = field(default_factory=dict)
    _turns: Counter[str | None] = field(default_factory=Counter)
    _side: SideCalls = field(default_factory=SideCalls)
    _spent_tokens: int = 0
    _reserved_tokens: int = 0
    _returned: asyncio.Event = field(default_factory=asyncio.Event)
    _in_flight: set[Interrupts] = field(default_factory=set)
    _sampling: dict[object, int] = field(default_factory=dict)
    _held: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.recorded = RecordedRequests(self.in_flight)

    @property
    def seconds_left(self) -> float:
        return self.spec.deadline - time.time()

    @property
    def limit(self) -> str | None:
        """The limit that holds an agent back: "turns", "tokens", "time", "context" or "record"."""
        return self.limits.latest

    @property
    def engine_failure(self) -> Failure | None:
        """The failure of an agent's latest call, or None if all latest calls succeeded."""
        return next(iter(self._unanswered.values()), None)

    @property
    def oldest_version(self) -> int:
        """The lowest policy version of trained tokens, calls in flight included; -1 if unknown."""
        recorded = (span.version for call in self.calls if call.trained for span in call.versions)
        known = [version for version in (*recorded, *self._sampling.values()) if version >= 0]
        return min(known, default=-1)

    @contextmanager
    def sampling(self, version: int) -> Iterator[None]:
        """Context in which a trained agent's call, begun with `version`, is at the engine."""
        call = object()
        self._sampling[call] = version
        try:
            yield
        finally:
            del self._sampling[call]

    @contextmanager
    def recording(self, agent: str | None = None) -> Iterator[None]:
        """Context in which a request of `agent` takes space in the record, which may be full."""
        try:
            yield
        except LimitReached:
            self.limits.refused("record", agent)
            raise

    def asked(self, agent: str | None, request: ModelRequest) -> None:
        """Registers a request of `agent`: one with tools shows which calls were side calls."""
        self._untrain(self._side.asked(agent, request))

    def take_turn(self, agent: str | None = None, *, side: bool = False) -> None:
        """Counts one turn of `agent`; a possible side call does not count for it."""
        if self.sealed:
            raise ended()
        self.check_time()
        most = self.spec.limits.max_turns
        agent = SIDE if side else agent
        if self._turns[agent] >= most:
            of = "this rollout" if agent is None else f"the agent {agent!r}"
            raise self.reached("turns", f"All {most} turns of {of} are used up.", agent)
        self._turns[agent] += 1

    def check_time(self) -> None:
        if self.seconds_left <= 0:
            raise self.reached("time", "The time of this rollout is used up.")

    async def reserve(
        self, each: int | None, choices: int, agent: str | None = None
    ) -> TokenReservation:
        """Reserves up to `each` tokens per answer; those of untrained agents do not count."""
        route = self.spec.route(agent)
        limit = self.spec.limits.max_completion_tokens if route.trained else None
        if limit is None:
            return TokenReservation(self, each, 0)
        enough = limit if each is None else each * choices
        while True:
            left = limit - self._spent_tokens - self._reserved_tokens
            if left >= enough or not self._reserved_tokens:
                break
            # Others may return tokens: a request must not be cut shorter than if it had come alone.
            self._returned.clear()
            await self._returned.wait()
        if left < choices:
            raise self.reached("tokens", f"All {limit} tokens of this rollout are used up.", agent)
        each = left // choices if each is None else min(each, left // choices)
        self._reserved_tokens += each * choices
        return TokenReservation(self, each, each * choices)

    def settle(self, reserved: int, spent: int) -> None:
        """Releases a reservation, of which `spent` tokens were used."""
        self._reserved_tokens -= reserved
        if reserved:
            self._spent_tokens += spent
        self._returned.set()

    def commit(self, calls: list[Call], *, side: bool = False) -> None:
        """Records `calls` and numbers them; `side`: they may be side calls."""
        if self.sealed:
            raise ended()
        for call in calls:
            call.index = len(self.calls)
            call.prompt_ids = self.prompts.share(call.prompt_ids)
            self.calls.append(call)
            self.committed_at.append(time.monotonic())
        if side and calls:
            self._untrain(self._side.recorded(calls[0].agent, calls))

    def _untrain(self, side_calls: list[Call]) -> None:
        self._spent_tokens -= sum(len(call.completion_ids) for call in side_calls)

    def engine_answered(self, agent: str | None = None) -> None:
        """Registers an answered call: the agent's earlier failures no longer count."""
        self._unanswered.pop(agent, None)
        self.limits.answered(agent)

    def engine_failed(
        self,
        error: EngineError,
        *,
        recorded: bool,
        agent: str | None = None,
        side: bool = False,
    ) -> EnvserverError:
        """Records that the engine failed a call of `agent`; returns the error to send to the agent.

        If nothing was recorded, the turn is returned, unless the request itself was at fault.
        """
        full = context_limit(error.message) if isinstance(error, EngineRefused) else None
        if full is not None:
            self._unanswered.pop(agent, None)
            self.limits.refused("context", agent)
            return full
        self._unanswered[agent] = error.failure()
        self.engine_failures += 1
        if not recorded and error.outcome is Outcome.RETRY:
            self.return_turn(agent, side=side)
        return error

    def engine_away(self, error: EngineError, agent: str | None) -> None:
        """Records that a call of `agent` waits for the engine: should time run out, that is why."""
        self._unanswered[agent] = error.failure()

    def sandbox_failed(self, error: SandboxError) -> None:
        """Records a sandbox failure. A lost sandbox stays a failure, since its files are gone."""
        if self.sandbox_failure is None or self.sandbox_failure.kind == SandboxUnavailable.kind:
            self.sandbox_failure = error.failure()

    def sandbox_opened(self) -> None:
        if self.sandbox_failure and self.sandbox_failure.kind == SandboxUnavailable.kind:
            self.sandbox_failure = None

    def service_failed(self, error: ServiceError) -> None:
        """Records the first failure of a service: the model is not to blame for what follows."""
        if self.service_failure is None:
            self.service_failure = error.failure()

    def return_turn(self, agent: str | None = None, *, side: bool = False) -> None:
        """Takes back the turn of a request that produced nothing."""
        self._turns[SIDE if side else agent] -= 1

    @contextmanager
    def working(self, interrupts: Interrupts) -> Iterator[None]:
        """Context of a request in flight, which is interrupted when the attempt is sealed."""
        self._in_flight.add(interrupts)
        try:
            yield
        finally:
            self._in_flight.discard(interrupts)

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Keeps `task` alive until it ends or the attempt is sealed."""
        self._held.add(task)
        task.add_done_callback(self._held.discard)
        task.add_done_callback(retrieve)

    def seal(self) -> None:
        """Ends the attempt: nothing more is recorded, requests and tasks in flight are stopped.

        State that only further requests need is freed; the record may be kept for long.
        """
        self.sealed = True
        for task in self._held:
            task.cancel()
        for interrupts in self._in_flight:
            interrupts.interrupt("sealed")
        self.retries.clear()
        self.memory.clear()
        self.histories.clear()
        self.recorded.clear()
        self.prompts = RecordedPrompts()

    def reached(self, limit: str, message: str, agent: str | None = None) -> LimitReached:
        """Records that `agent` reached `limit`; returns the error for it."""
        self.limits.refused(limit, agent)
        return LimitReached(message, limit=limit)


class TokenReservation:
    """Tokens of one request, `max_tokens` per choice; a context manager, releases unused ones."""

    def __init__(self, attempt: ProxyAttempt, max_tokens: int | None, reserved: int) -> None:
        self.max_tokens = max_tokens
        self.spent = 0
        self._attempt = attempt
        self._reserved = reserved

    def __enter__(self) -> TokenReservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._attempt.settle(self._reserved, self.spent)


def ended() -> ConflictError:
    return ConflictError("This attempt has ended.")
