"""Events of rollouts and groups, failed attempts without hidden values, rollouts in progress."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from envserver_records.errors import (
    Failure,
    JudgeError,
    RolloutError,
    ScorerError,
    Straggler,
    Unscorable,
)
from envserver_records.records import Call, Group, Message, Usage
from envserver_records.timings import MOST_ATTEMPTS, FailedAttempt

from ..telemetry.redaction import redacted
from .estimates import Scored, scored_of
from .policy import Alike, Drop, Untrained, is_bug
from .stream import GroupRequest

T = TypeVar("T")


class RolloutFailed(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt failed. `final`: it is not retried, the rollout is lost. `turns`, `tokens`,
    `messages`: see `RolloutError`; messages of the last attempt, or where calls are kept."""

    group_id: str
    index: int
    task_id: str
    rollout_id: str
    attempt: int
    failure: Failure
    final: bool
    at: float
    turns: int = 0
    tokens: int = 0
    messages: list[Message] = []


class RolloutScored(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout has a score. `scorable`: the score has a reward, which `score_group` may still
    change: rewards are shown from delivered groups only. `seconds`: wall clock. `limit`: what ended
    it, None when its agent did. `usage`: with its scoring and cost, without its share of
    `score_group`."""

    group_id: str
    rollout_id: str
    scorable: bool
    turns: int
    completion_tokens: int
    seconds: float
    flags: list[str] = msgspec.field(default_factory=list)
    prompt_tokens: int = 0
    limit: str | None = None
    untrained: Untrained = Untrained()
    usage: Usage | None = None


class GroupDropped(msgspec.Struct, frozen=True, kw_only=True):
    """A group was not delivered; the fields of `policy.Drop`.

    `reason`: zero_variance, incomplete, unscorable, too_long, stale or untrained.
    """

    group_id: str
    index: int
    task_id: str
    reason: str
    failed: bool
    message: str
    at: float
    scored: Scored | None = None
    alike: tuple[Alike, ...] = ()


def dropped(request: GroupRequest, drop: Drop) -> GroupDropped:
    return GroupDropped(
        group_id=request.group_id,
        index=request.index,
        task_id=request.task.id,
        reason=drop.reason,
        failed=drop.failed,
        message=drop.message,
        at=time.time(),
        scored=drop.scored,
        alike=drop.alike,
    )


class GroupDelivered(msgspec.Struct, frozen=True, kw_only=True):
    """A group is stored durably in the sink."""

    group: Group


Event = RolloutFailed | RolloutScored | GroupDropped | GroupDelivered


def scored_in(event: Event) -> Scored | None:
    """Returns what a group that has ended says about its task."""
    if isinstance(event, GroupDelivered):
        return scored_of(event.group)
    return event.scored if isinstance(event, GroupDropped) else None


class Observer(Protocol):
    """Receives each event in order, on the event loop; must not block."""

    def __call__(self, event: Event) -> None: ...


class OrderSink(Protocol):
    """Stores finished groups."""

    async def put(self, group: Group) -> None:
        """Returns when `group` is durable; the same `group_id` twice is stored once."""

    async def known(self, group_ids: list[str]) -> set[str]:
        """Returns the ids of groups that need not be made again."""


class GroupSink(OrderSink, Protocol):
    async def wait_for_capacity(self) -> None:
        """Waits until another group may start."""


STRUCK = "[hidden]"
_SHORTEST = 4
_SHORTEST_LINE = 8
_MOST_PIECES = 5000


def without_hidden(text: str, hidden: dict[str, Any]) -> str:
    """Returns `text`, such as a scorer's exception, without the values of `hidden`: every string
    and number that is long enough not to be a common word, also as Python and JSON write it, and
    each longer line of its texts."""
    pieces: set[str] = set()
    for value in _values(hidden):
        if len(pieces) >= _MOST_PIECES:
            return STRUCK  # too much to look for: nothing is shown
        pieces.update(_written(value))
    for piece in sorted(pieces, key=len, reverse=True):
        text = text.replace(piece, STRUCK)
    return text


def _values(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode(errors="replace")
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _values(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _values(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield repr(value)


def _written(value: str) -> Iterator[str]:
    lines = [line.strip() for line in value.splitlines()] if "\n" in value else []
    for shortest, part in [(_SHORTEST, value), *((_SHORTEST_LINE, line) for line in lines)]:
        if len(part) >= shortest:
            yield part
            yield repr(part)[1:-1]
            yield json.dumps(part)[1:-1]


_LONGEST_MESSAGE = 1000
_LEAST_ERRORS = 8
_SAW_HIDDEN = (ScorerError, JudgeError, Unscorable)
"""Errors of code that knows the hidden part of the task, and may quote it."""


@dataclass(eq=False, repr=False)
class GroupFailures:
    """The failed attempts of one group, reported to the observer and kept for the group's record.

    `lost`: number of rollouts lost for good, by kind of their last failure. `bug`: why the group is
    dropped, if a bug ended it before any rollout was scored.
    """

    observer: Observer
    request: GroupRequest
    keep_messages: bool = False
    """Whether the group's record has the conversations of failed attempts."""

    def __post_init__(self) -> None:
        self.seen: list[Failure] = []
        self.lost: Counter[str] = Counter()
        self.scored = 0
        self._errors: Counter[str] = Counter()
        self.bug: Drop | None = None
        self._attempts: Counter[int] = Counter()
        self._began: dict[int, float] = {}
        self._failed: defaultdict[int, list[FailedAttempt]] = defaultdict(list)

    def next_attempt(self, number: int) -> int:
        """Returns the number, from 1, of the attempt of rollout `number` that starts now."""
        self._attempts[number] += 1
        self._began[number] = time.monotonic()
        return self._attempts[number]

    def of(self, number: int) -> list[FailedAttempt]:
        """Returns the failed attempts of rollout `number`, the latest ones in order."""
        return self._failed[number][-MOST_ATTEMPTS:]

    def marking(
        self, attempt: Callable[[int], Awaitable[T]], group_size: int
    ) -> Callable[[int], Awaitable[T]]:
        """Returns `attempt`; its error is marked as a bug of the environment, which is not tried
        again, if the same exception has ended all attempts of the group so far, two for each
        rollout and at least eight: fewer may come from what the model said."""

        enough = max(_LEAST_ERRORS, 2 * group_size)

        async def marked(deaths: int) -> T:
            try:
                return await attempt(deaths)
            except RolloutError as error:
                self._errors[f"{error.message}{error.detail.pop('said', '')}"] += 1
                is_all = len(self._errors) == 1 and self._errors.total() >= enough
                is_suspect = "may_be_bug" in error.detail and not is_bug(error)
                if is_suspect and is_all and not self.scored:
                    bug = f"A bug in the environment: {error.message} {error.detail['place']}"
                    error.detail["bug"] = bug.strip()
                raise

        return marked

    def add(self, number: int, error: RolloutError, *, final: bool) -> Failure:
        knows_hidden = isinstance(error, _SAW_HIDDEN)
        failure = _safe(error.failure(), self.request.task.hidden if knows_hidden else {})
        self.seen.append(failure)
        self._failed[number].append(
            FailedAttempt(
                attempt=self._attempts[number],
                kind=failure.kind,
                blame=failure.blame,
                message=failure.message[:_LONGEST_MESSAGE],
                seconds=round(time.monotonic() - self._began.get(number, time.monotonic()), 3),
                turns=error.turns,
                tokens=error.tokens,
                messages=[*error.messages] if self.keep_messages else [],
            )
        )
        if final:
            self.lost[failure.kind] += 1
            if is_bug(error) and not self.scored:
                bug, missing = failure.detail["bug"], "missing" in error.detail
                self.bug = Drop("incomplete", bug, True, bug=True, hopeless=missing)
        self.observer(
            RolloutFailed(
                group_id=self.request.group_id,
                index=self.request.index,
                task_id=self.request.task.id,
                rollout_id=rollout_id_of(self.request, number),
                attempt=self._attempts[number],
                failure=failure,
                final=final,
                at=time.time(),
                turns=error.turns,
                tokens=error.tokens,
                messages=[*error.messages] if final or self.keep_messages else [],
            )
        )
        return failure


def _safe(failure: Failure, hidden: dict[str, Any]) -> Failure:

    def safe(text: str) -> str:
        return redacted(without_hidden(text, hidden))

    detail = {
        name: safe(value) if isinstance(value, str) else value
        for name, value in failure.detail.items()
    }
    return msgspec.structs.replace(failure, message=safe(failure.message), detail=detail)


def rollout_id_of(request: GroupRequest, number: int) -> str:
    return f"{request.group_id}-r{number}"


def straggler(seconds: float) -> Straggler:
    return Straggler(
        f"The rollout was cancelled when its group was {seconds:.1f} s old.",
        hint="See rollouts.group_timeout_seconds and rollouts.straggler_grace_seconds.",
    )


class RunningRollout(msgspec.Struct):
    """An attempt at rollout number `rollout` of a group, in progress. `attempt`: from 1; 0 while it
    waits for a place. `since`: when it began to wait, later when its agent began. `worker`: process
    id."""

    environment: str
    group_id: str
    task_id: str
    rollout: int
    since: float
    attempt: int = 0
    state: Literal["waiting", "playing", "scoring"] = "waiting"
    turns: int = 0
    tokens: int = 0
    worker: int | None = None

    def count(self, calls: Sequence[Call]) -> None:
        self.turns = sum(call.choice == 0 for call in calls)
        self.tokens = sum(len(call.completion_ids) for call in calls)


class RunningRollouts:
    """The rollouts of one environment that are in progress, by id, oldest first."""

    def __init__(self) -> None:
        self.by_id: dict[str, RunningRollout] = {}
        self.silent: int | None = 0
        """Number of rollouts that gave neither an output nor a reward; None after one that did."""

    @contextmanager
    def shown(self, request: GroupRequest, number: int) -> Iterator[RunningRollout]:
        rollout_id = rollout_id_of(request, number)
        shown = RunningRollout(
            request.env, request.group_id, request.task.id, number, since=time.time()
        )
        self.by_id[rollout_id] = shown
        try:
            yield shown
        finally:
            del self.by_id[rollout_id]
