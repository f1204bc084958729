"""One attempt at a task, live: its limits, its recorded calls, what its worker posted.

Requests of one attempt may run at the same time. A turn is counted when a request is admitted and
its tokens are reserved until it ends, so that no interleaving exceeds a limit; a request that wants
more than is left unreserved waits for what the others return.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..actions import Steps
from ..errors import (
    ConflictError,
    EngineError,
    EngineRefused,
    EnvserverError,
    Failure,
    LimitReached,
    Outcome,
    SandboxError,
    SandboxUnavailable,
    ServiceError,
)
from ..records import Call, PublicTask
from ..tokens.history import History
from .asgi import Interrupts
from .retries import Retries

_CONTEXT_IS_FULL = re.compile(r"context[ _]length|max_model_len|maximum model length", re.I)
"""In the words in which vLLM, SGLang and OpenAI refuse a prompt that is too long."""


class Limits(msgspec.Struct, frozen=True):
    """What one attempt may use. `max_completion_tokens` None: no such limit."""

    max_turns: int
    max_completion_tokens: int | None


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt is about.

    Args:
        env_reference: from which a worker loads the environment.
        deadline: `time.time()` in seconds.
        group_id: of the rollouts that are compared with this one; "": of none.
        sampling: `temperature`, `top_p` (both forced) and `max_tokens` (a cap).
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


@dataclass(eq=False)
class Attempt:
    """The live record of one attempt.

    Args:
        calls: in order of commit.
        limit: "turns", "tokens", "time" or "context" once a call was refused for it.
        engine_failure: how the engine failed the agent's last exchange with it, None when that one
            was answered.
        engine_failures: how many times it did so.
        sandbox_failure: how a sandbox of the attempt failed, or why it could not get one; None
            where all is well.
        service_failure: how a service of the environment failed it, None where none did.
        service_calls: how often it asked one.
        flags: words that services put on its trajectory.
        output, metrics, steps, posted, failure: what the worker posted.
        late_calls: model calls that came after the end.
        memory: what each dialect keeps of this attempt.
        retries: its latest requests.
        history: what its calls can be continued from; None until something could be.
    """

    key: str
    spec: AttemptSpec
    calls: list[Call] = field(default_factory=list)
    sealed: bool = False
    limit: str | None = None
    engine_failure: Failure | None = None
    engine_failures: int = 0
    sandbox_failure: Failure | None = None
    service_failure: Failure | None = None
    service_calls: int = 0
    flags: set[str] = field(default_factory=set)
    output: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)
    posted: bool = False
    failure: Failure | None = None
    late_calls: int = 0
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    retries: Retries[Any] = field(default_factory=Retries)
    history: History | None = None
    _turns: int = 0
    _spent_tokens: int = 0
    _reserved_tokens: int = 0
    _returned: asyncio.Event = field(default_factory=asyncio.Event)
    _in_flight: set[Interrupts] = field(default_factory=set)
    _held: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def seconds_left(self) -> float:
        return self.spec.deadline - time.time()

    def take_turn(self) -> None:
        """Counts one turn.

        Raises:
            ConflictError: the attempt is sealed.
            LimitReached: turns or time are used up.
        """
        if self.sealed:
            raise ended()
        self.check_time()
        if self._turns >= self.spec.limits.max_turns:
            raise self.reached("turns", f"All {self._turns} turns of this rollout are used up.")
        self._turns += 1

    def check_time(self) -> None:
        """
        Raises:
            LimitReached: time is used up.
        """
        if self.seconds_left <= 0:
            raise self.reached("time", "The time of this rollout is used up.")

    async def reserve(self, wanted: int | None, choices: int) -> Grant:
        """Reserves completion tokens for a request with `choices` answers of up to `wanted` each.

        Raises:
            LimitReached: none are left.
        """
        cap = self.spec.sampling.get("max_tokens")
        each = min((n for n in (wanted, cap) if n is not None), default=None)
        limit = self.spec.limits.max_completion_tokens
        if limit is None:
            return Grant(self, each, 0)
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
        return Grant(self, each, each * choices)

    def settle(self, reserved: int, spent: int) -> None:
        """Returns a reservation of which `spent` tokens were used."""
        self._reserved_tokens -= reserved
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

    def engine_answered(self) -> None:
        """An exchange came to its end: failures before it are overcome."""
        self.engine_failure = None

    def engine_failed(self, error: EngineError, *, recorded: bool) -> EnvserverError:
        """Notes a failure of which the agent is told; in what words.

        A request of which nothing was recorded is no turn, unless it was itself at fault.
        """
        if isinstance(error, EngineRefused) and _CONTEXT_IS_FULL.search(str(error)):
            self.engine_answered()
            return self.reached("context", str(error))
        self.engine_failure = error.failure()
        self.engine_failures += 1
        if not recorded and error.outcome is Outcome.RETRY:
            self.return_turn()
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

    def return_turn(self) -> None:
        """The request that took it came to nothing."""
        self._turns -= 1

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
        self.history = None

    def reached(self, limit: str, message: str) -> LimitReached:
        """Notes that `limit` ended the attempt; the error to tell the agent."""
        self.limit = limit
        return LimitReached(message, limit=limit)


class Grant:
    """Completion tokens reserved for one request; a context manager that returns what is unused.

    Args:
        max_tokens: for each choice; None where nothing limits them.
    """

    def __init__(self, attempt: Attempt, max_tokens: int | None, reserved: int) -> None:
        self.max_tokens = max_tokens
        self.spent = 0
        self._attempt = attempt
        self._reserved = reserved

    def __enter__(self) -> Grant:
        return self

    def __exit__(self, *exc: object) -> None:
        self._attempt.settle(self._reserved, self.spent)


def ended() -> ConflictError:
    """What a request is told that comes, or is still there, after the end of its attempt."""
    return ConflictError("This attempt has ended.")
