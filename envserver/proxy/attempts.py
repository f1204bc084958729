"""One attempt at a task, live: its limits, its recorded calls, what its worker posted.

Requests of one attempt may run at the same time. A turn is counted when a request is admitted and
its tokens are reserved until it ends, so that no interleaving exceeds a limit; a request that wants
more than is left unreserved waits for what the others return.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
from envserver_records.records import Call, PublicTask, ServiceCall

from ..actions import Steps
from ..telemetry.tracing import NO_SPAN, Span
from ..tokens.history import History
from .asgi import Interrupts
from .retries import Retries

_CONTEXT_IS_FULL = re.compile(r"context[ _]length|max_model_len|maximum model length", re.I)
"""In the words in which vLLM, SGLang and OpenAI refuse a prompt that is too long."""


class Limits(msgspec.Struct, frozen=True):
    """What one attempt may use. `max_completion_tokens` None: no such limit.

    Turns are of each agent by itself (undeclared names are one), tokens of all that are trained.
    """

    max_turns: int
    max_completion_tokens: int | None


class AgentRoute(msgspec.Struct, frozen=True, kw_only=True):
    """How one agent of an attempt is asked.

    Args:
        model: the name to ask for.
        sampling: see AttemptSpec.
        trained: whether what it samples is trained.
        source: name of the engine that is asked; "": the one of all rollouts.
        follows_policy: whether it is sampled by the policy, and so by a version of it.
    """

    model: str
    sampling: dict[str, Any]
    trained: bool = True
    endpoint: str = ""
    follows_policy: bool = True


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt is about.

    Args:
        env_reference: from which a worker loads the environment.
        deadline: `time.time()` in seconds.
        group_id: of the rollouts that are compared with this one; "": of none.
        sampling: `temperature`, `top_p` (both forced) and `max_tokens` (a cap).
        agents: by name, where there are several; the first is the main one.
        keep_services: record what services are asked and answer.
    """

    rollout_id: str
    attempt: int
    env: str
    env_reference: str
    env_config: dict[str, Any]
    task: PublicTask
    model: str
    deadline: float
    limits: Limits
    sampling: dict[str, Any]
    group_id: str = ""
    agents: dict[str, AgentRoute] = msgspec.field(default_factory=dict)
    keep_services: bool = False

    def agent(self, name: str | None) -> str | None:
        """Who asks that calls itself `name`: who says nothing is the main one.

        Raises:
            InputError: the environment has declared its agents, and this is none of them.
        """
        if not self.agents or name in self.agents:
            return name
        if name is None:
            return next(iter(self.agents))
        raise InputError(
            f"There is no agent {name!r} in this rollout; there are: {', '.join(self.agents)}."
        )

    def route(self, agent: str | None) -> AgentRoute:
        """How `agent` is asked."""
        known = self.agents.get(agent or "")
        return known or AgentRoute(model=self.model, sampling=self.sampling)

    def routing_key(self, agent: str | None) -> str:
        """Under which name the engine knows the calls of `agent`: they go to one replica."""
        return routing_key(self.rollout_id, agent if agent in self.agents else None)


def routing_key(rollout_id: str, agent: str | None) -> str:
    """See `AttemptSpec.line`; `agent` is a declared one, or None."""
    return rollout_id if agent is None else f"{rollout_id}/{agent}"


@dataclass(eq=False)
class ProxyAttempt:
    """The live record of one attempt.

    Args:
        calls: in order of commit.
        limit: "turns", "tokens", "time" or "context" once a call was refused for it.
        engine_failures: how many times it did so.
        sandbox_failure: how a sandbox of the attempt failed, or why it could not get one; None
            where all is well.
        service_failure: how a service of the environment failed it, None where none did.
        service_calls: how often it asked one.
        asked_services: what it asked them, where that is kept.
        flags: words that services put on its trajectory.
        output, metrics, steps, posted, failure: what the worker posted.
        late_calls: model calls that came after the end.
        memory: what each dialect keeps of this attempt.
        retries: its latest requests.
        histories: what its calls can be continued from, by how their engine is asked.
        span: of the agent's work; its model calls are parts of it.
    """

    key: str
    spec: AttemptSpec
    calls: list[Call] = field(default_factory=list)
    sealed: bool = False
    limit: str | None = None
    engine_failures: int = 0
    sandbox_failure: Failure | None = None
    service_failure: Failure | None = None
    service_calls: int = 0
    asked_services: list[ServiceCall] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    output: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)
    posted: bool = False
    failure: Failure | None = None
    late_calls: int = 0
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    retries: Retries[Any] = field(default_factory=Retries)
    histories: dict[Any, History] = field(default_factory=dict)
    span: Span = NO_SPAN
    _unanswered: dict[str | None, Failure] = field(default_factory=dict)
    _turns: Counter[str | None] = field(default_factory=Counter)
    _spent_tokens: int = 0
    _reserved_tokens: int = 0
    _returned: asyncio.Event = field(default_factory=asyncio.Event)
    _in_flight: set[Interrupts] = field(default_factory=set)
    _sampling: dict[object, int] = field(default_factory=dict)
    _held: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def seconds_left(self) -> float:
        return self.spec.deadline - time.time()

    @property
    def engine_failure(self) -> Failure | None:
        """How an engine failed an agent's last exchange with it; None when all were answered."""
        return next(iter(self._unanswered.values()), None)

    @property
    def oldest_version(self) -> int:
        """The lowest policy version that sampled a token that is trained, be it of a call that is
        at the engine now; -1: of none it is known."""
        recorded = (span.version for call in self.calls if call.trained for span in call.versions)
        known = [version for version in (*recorded, *self._sampling.values()) if version >= 0]
        return min(known, default=-1)

    @contextmanager
    def sampling(self, version: int) -> Iterator[None]:
        """Within: a call of a trained agent is at the engine, which began it with `version`."""
        call = object()
        self._sampling[call] = version
        try:
            yield
        finally:
            del self._sampling[call]

    def take_turn(self, agent: str | None = None) -> None:
        """Counts one turn of `agent`.

        Raises:
            ConflictError: the attempt is sealed.
            LimitReached: turns or time are used up.
        """
        if self.sealed:
            raise ended()
        self.check_time()
        who, most = self._counted(agent), self.spec.limits.max_turns
        if self._turns[who] >= most:
            of = "this rollout" if who is None else f"the agent {who!r}"
            raise self.reached("turns", f"All {most} turns of {of} are used up.")
        self._turns[who] += 1

    def check_time(self) -> None:
        """
        Raises:
            LimitReached: time is used up.
        """
        if self.seconds_left <= 0:
            raise self.reached("time", "The time of this rollout is used up.")

    async def reserve(
        self, wanted: int | None, choices: int, agent: str | None = None
    ) -> TokenReservation:
        """Reserves completion tokens for a request with `choices` answers of up to `wanted` each.

        Those of an agent that is not trained are not counted.

        Raises:
            LimitReached: none are left.
        """
        route = self.spec.route(agent)
        cap = route.sampling.get("max_tokens")
        each = min((n for n in (wanted, cap) if n is not None), default=None)
        limit = self.spec.limits.max_completion_tokens if route.trained else None
        if limit is None:
            return TokenReservation(self, each, 0)
        enough = limit if each is None else each * choices
        while True:
            left = limit - self._spent_tokens - self._reserved_tokens
            if left >= enough or not self._reserved_tokens:
                break
            # Others may return enough: a request must not be cut shorter than if it came alone.
            self._returned.clear()
            await self._returned.wait()
        if left < choices:
            raise self.reached("tokens", f"All {limit} tokens of this rollout are used up.")
        each = left // choices if each is None else min(each, left // choices)
        self._reserved_tokens += each * choices
        return TokenReservation(self, each, each * choices)

    def settle(self, reserved: int, spent: int) -> None:
        """Returns a reservation of which `spent` tokens were used."""
        self._reserved_tokens -= reserved
        if reserved:
            self._spent_tokens += spent
        self._returned.set()

    def commit(self, calls: list[Call]) -> None:
        """Records `calls`, and numbers them.

        Raises:
            ConflictError: the attempt is sealed; nothing was recorded.
        """
        if self.sealed:
            raise ended()
        for call in calls:
            call.index = len(self.calls)
            self.calls.append(call)

    def engine_answered(self, agent: str | None = None) -> None:
        """An exchange of `agent` came to its end: its failures before it are overcome."""
        self._unanswered.pop(self._counted(agent), None)

    def engine_failed(
        self, error: EngineError, *, recorded: bool, agent: str | None = None
    ) -> EnvserverError:
        """Notes a failure of which `agent` is told; in what words.

        A request of which nothing was recorded is no turn, unless it was itself at fault.
        """
        if isinstance(error, EngineRefused) and _CONTEXT_IS_FULL.search(str(error)):
            self.engine_answered(agent)
            return self.reached("context", str(error))
        self._unanswered[self._counted(agent)] = error.failure()
        self.engine_failures += 1
        if not recorded and error.outcome is Outcome.RETRY:
            self.return_turn(agent)
        return error

    def sandbox_failed(self, error: SandboxError) -> None:
        """Notes a failure that is ours. One that was lost is never overcome: its files are gone."""
        if self.sandbox_failure is None or self.sandbox_failure.kind == SandboxUnavailable.kind:
            self.sandbox_failure = error.failure()

    def sandbox_opened(self) -> None:
        """There is one now: that there was none before is overcome."""
        if self.sandbox_failure and self.sandbox_failure.kind == SandboxUnavailable.kind:
            self.sandbox_failure = None

    def service_failed(self, error: ServiceError) -> None:
        """Notes a failure that is ours: what the agent makes of it is not the model's doing."""
        if self.service_failure is None:
            self.service_failure = error.failure()

    def return_turn(self, agent: str | None = None) -> None:
        """The request that took it came to nothing."""
        self._turns[self._counted(agent)] -= 1

    def _counted(self, agent: str | None) -> str | None:
        """As whom `agent` is counted: whoever is not declared is one, however it calls itself."""
        return agent if agent in self.spec.agents else None

    def working(self, interrupts: Interrupts) -> None:
        """`interrupts` is interrupted when the attempt is sealed."""
        self._in_flight.add(interrupts)

    def done(self, interrupts: Interrupts) -> None:
        self._in_flight.discard(interrupts)

    def hold(self, task: asyncio.Task[Any]) -> None:
        """`task` works for this attempt, whoever waits for it, and ends with it."""
        self._held.add(task)
        task.add_done_callback(self._let_go)

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        self._held.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits for it; there may be nobody

    def seal(self) -> None:
        """Nothing is recorded any more; requests in flight and work without one end.

        What only further requests would need is let go: the record itself may be kept for long.
        """
        self.sealed = True
        for task in self._held:
            task.cancel()
        for interrupts in self._in_flight:
            interrupts.interrupt("sealed")
        self.retries.clear()
        self.memory.clear()
        self.histories.clear()

    def reached(self, limit: str, message: str) -> LimitReached:
        """Notes that `limit` ended the attempt; the error to tell the agent."""
        self.limit = limit
        return LimitReached(message, limit=limit)


class TokenReservation:
    """Completion tokens reserved for one request; a context manager that returns what is unused.

    Args:
        max_tokens: for each choice; None where nothing limits them.
    """

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
    """What a request is told that comes, or is still there, after the end of its attempt."""
    return ConflictError("This attempt has ended.")
